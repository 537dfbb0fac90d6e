"""Configurations and tensors of HuggingFace's families, both ways: names, bits, sizes and refusals."""

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families import (
    FAMILIES,
    canonical_config,
    check_hf_tensors,
    family_of,
    from_hf,
    hf_config,
    hf_shapes,
    to_hf,
)
from megatron.model import build_stage, freeze, layer_params
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.family_models import CASES, PADDED, VOCAB, collected, config_of, on_disk, random_model
from tests.model.stages import random_weights, small

# Cases that a simpler family computes too, which is then the one that is written.
SIMPLER = {"mistral full": "llama"}


def nothing(name: str) -> Tensor:
    raise AssertionError(f"{name} was read")


def args_of(config: dict[str, Any], **more: Any) -> NeoXArgs:
    return NeoXArgs.from_dict({**from_hf(config, nothing)[0], **more})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_changes_no_bit(case: str, dtype: torch.dtype) -> None:
    config, hf_tensors = on_disk(random_model(case, dtype))
    keys, tensors = from_hf(config, hf_tensors.__getitem__, padded_vocab_size=PADDED)
    ours = collected(tensors)
    args = NeoXArgs.from_dict(keys)
    assert {n: {s.name for s in specs} for n, specs in layer_params(args).items()} == {n: {*t} for n, t in ours.items()}
    back = dict(to_hf(args, ours.items(), vocab_size=VOCAB))
    assert back.keys() == hf_tensors.keys()
    for name, tensor in hf_tensors.items():
        assert back[name].dtype == dtype and torch.equal(back[name], tensor), name
        assert back[name].is_contiguous() and back[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("case", CASES)
def test_configuration_there_and_back(case: str) -> None:
    config = config_of(case).to_dict()
    args = args_of(config)
    written = hf_config(args)
    assert written["model_type"] == SIMPLER.get(case, config["model_type"])
    assert canonical_config(args_of(written)) == canonical_config(args)
    again = transformers.AutoConfig.for_model(**hf_config(args, family=config["model_type"])).to_dict()
    assert canonical_config(args_of(again)) == canonical_config(args)
    for name in ("rope_parameters", "layer_types", "sliding_window", "no_rope_layers", "num_key_value_heads"):
        assert again.get(name) == config.get(name), name


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES.values()}))
def test_what_config_json_leaves_out_is_the_default_of_transformers(kind: str) -> None:
    whole = getattr(transformers, kind)().to_dict()
    least = {"model_type": whole["model_type"], "vocab_size": whole["vocab_size"]}
    assert canonical_config(args_of(least)) == canonical_config(args_of(whole))


# config.json as published (sizes and what changes the maths): (file, parameters on the model card or of
# transformers).
_LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
_YARN = {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
         "original_max_position_embeddings": 8192, "rope_type": "yarn"}  # fmt: skip


def sizes(
    kind: str, vocab: int, hidden: int, layers: int, heads: int, kv: int, ffn: int, length: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": ffn,
        "max_position_embeddings": length, **more,
    }  # fmt: skip


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Pythia 70M": (70_426_624, sizes("gpt_neox", 50304, 512, 6, 8, 8, 2048, 2048, rotary_pct=0.25)),
    "Llama 2 7B": (6_738_415_616, sizes("llama", 32000, 4096, 32, 32, 32, 11008, 4096, rms_norm_eps=1e-5)),
    "Llama 3.1 8B": (8_030_261_248, sizes(
        "llama", 128256, 4096, 32, 32, 8, 14336, 131072, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=_LLAMA31)),
    "SmolLM2 135M": (134_515_008, sizes(
        "llama", 49152, 576, 30, 9, 3, 1536, 8192, rope_theta=100000, tie_word_embeddings=True)),
    "Mistral 7B": (7_241_732_096, sizes("mistral", 32000, 4096, 32, 32, 8, 14336, 32768, sliding_window=4096)),
    "Qwen 3 0.6B": (596_049_920, sizes(
        "qwen3", 151936, 1024, 28, 16, 8, 3072, 40960, head_dim=128, rope_theta=1000000, tie_word_embeddings=True)),
    "Qwen 3 8B": (8_190_735_360, sizes(
        "qwen3", 151936, 4096, 36, 32, 8, 12288, 40960, head_dim=128, rope_theta=1000000)),
    "OLMo 2 7B": (7_298_617_344, sizes("olmo2", 100352, 4096, 32, 32, 32, 11008, 4096, rms_norm_eps=1e-6)),
    "OLMo 3 7B": (7_298_011_136, sizes("olmo3", 100278, 4096, 32, 32, 32, 11008, 65536, rope_scaling=_YARN)),
    "Gemma 3 270M": (268_098_176, sizes(
        "gemma3_text", 262144, 640, 18, 4, 1, 2048, 32768, head_dim=256, sliding_window=512,
        rope_local_base_freq=10000, rope_theta=1000000, _sliding_window_pattern=6)),
    "SmolLM3 3B": (3_075_098_624, sizes(
        "smollm3", 128256, 2048, 36, 16, 4, 11008, 65536, rope_theta=5000000.0, no_rope_layer_interval=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_on_the_meta_device(name: str) -> None:
    parameters, config = PUBLISHED[name]
    args = args_of(config)
    stage = build_stage(args, ParallelGroups.single(torch.device("meta")))
    assert sum(param.numel() for param in stage.parameters()) == parameters
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert sum(param.numel() for param in model.parameters()) == parameters
    # transformers 5 writes it otherwise
    assert canonical_config(args_of(model.config.to_dict())) == canonical_config(args)
    assert sum(torch.Size(shape).numel() for shape in hf_shapes(args).values()) == parameters
    assert hf_config(args)["model_type"] == config["model_type"]


def test_two_last_layers_and_the_tied_head_of_smollm3() -> None:
    args = args_of(PUBLISHED["SmolLM3 3B"][1]).replace(trainable={"last_layers": 2, "head": True})
    stage = build_stage(args, ParallelGroups.single(torch.device("meta")))
    freeze(stage_parameters(stage), args)
    trained = sum(param.numel() for param in stage.parameters() if param.requires_grad)
    total = sum(param.numel() for param in stage.parameters())
    assert (trained, total, f"{trained / total:.2%}") == (418_914_304, 3_075_098_624, "13.62%")


def test_gemma_270m_is_read_as_published() -> None:
    args = args_of(PUBLISHED["Gemma 3 270M"][1])
    assert args.layer_types == (("sliding_attention",) * 5 + ("full_attention",)) * 3
    assert (args.sliding_window_width, args.rope_local_base_freq, args.rotary_emb_base) == (511, 10000.0, 1000000)
    assert args.embedding_multiplier == 640**0.5
    assert args.head_dim == 256 != args.hidden_size // args.num_attention_heads
    smol = args_of(PUBLISHED["SmolLM3 3B"][1])
    assert smol.no_rope_layers == (1, 1, 1, 0) * 9 and not smol.no_weight_tying


def test_tensors_are_read_one_by_one() -> None:
    config, hf_tensors = on_disk(random_model("llama 3"))
    asked: list[str] = []

    def get(name: str) -> Tensor:
        asked.append(name)
        return hf_tensors[name]

    _, tensors = from_hf(config, get)
    assert asked == []
    assert next(tensors)[:2] == (0, "word_embeddings.weight") and len(asked) == 1
    names = [(layer, name) for layer, name, _ in tensors]
    assert names[-2:] == [(7, "norm.scale"), (8, "final_linear.weight")] and len(asked) == len(hf_tensors)
    args = NeoXArgs.from_dict(from_hf(config, nothing)[0])
    taken: list[int] = []

    def layers() -> Any:
        for layer, weights in random_weights(args).items():
            taken.append(layer)
            yield layer, weights

    written = to_hf(args, layers())
    assert next(written)[0] == "model.embed_tokens.weight" and taken == [0]


def test_added_rows_are_the_mean_of_the_others() -> None:
    config, hf_tensors = on_disk(random_model("mistral"))
    _, tensors = from_hf(config, hf_tensors.__getitem__, padded_vocab_size=PADDED)
    head = collected(tensors)[8]["final_linear.weight"]
    mean = hf_tensors["lm_head.weight"].mean(0)
    assert head.shape[0] == PADDED and torch.equal(head[:VOCAB], hf_tensors["lm_head.weight"])
    torch.testing.assert_close(head[VOCAB:], mean.expand(PADDED - VOCAB, -1))


def broken(case: str, change: Any) -> str:
    """What `check_hf_tensors` says of a damaged folder."""
    config, hf_tensors = on_disk(random_model(case))
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()}
    keys = from_hf(config, nothing)[0]
    check_hf_tensors(config, keys, shapes, "folder")
    change(shapes)
    with pytest.raises(CheckpointError) as caught:
        check_hf_tensors(config, keys, shapes, "folder")
    return str(caught.value)


def test_missing_and_extra_tensors_are_told_by_kind() -> None:
    def change(shapes: dict[str, Any]) -> None:
        for i in (1, 3):
            del shapes[f"model.layers.{i}.mlp.up_proj.weight"]
        shapes["model.layers.0.self_attn.sinks"] = (8,)
        shapes["model.norm.weight"] = (31,)
        shapes["model.rotary_emb.inv_freq"] = (2,)  # a buffer

    assert broken("llama 3", change).splitlines() == [
        "folder: does not fit its config.json:",
        "  missing model.layers.N.mlp.up_proj.weight (layers 1, 3)",
        "  extra model.layers.N.self_attn.sinks (layers 0)",
        "  model.norm.weight: shape (31,) in the file, (32,) by config.json",
    ]


def test_buffers_of_old_pythia_files_are_skipped() -> None:
    config, hf_tensors = on_disk(random_model("gpt_neox"))
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()}
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        shapes[f"gpt_neox.layers.0.attention.{name}"] = (1,)
    check_hf_tensors(config, from_hf(config, nothing)[0], shapes, "folder")


def test_a_head_that_is_not_there_is_tied() -> None:
    assert "tie_word_embeddings should be true" in broken("qwen 3 windows", lambda shapes: shapes.pop("lm_head.weight"))
    config, hf_tensors = on_disk(random_model("qwen 3"))
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()} | {"lm_head.weight": (VOCAB, 32)}
    check_hf_tensors(config, from_hf(config, nothing)[0], shapes, "folder")  # transformers ignores it too


def test_what_cannot_be_read_is_refused() -> None:
    def refused(message: str, case: str, **changes: Any) -> None:
        with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
            from_hf({**config_of(case).to_dict(), **changes}, nothing)

    assert family_of({"model_type": "olmo3"}) == "olmo3" and set(FAMILIES) > {"llama", "gemma3_text"}
    refused("model_type: phi3 is not supported; one of gpt_neox, llama", "llama 2", model_type="phi3")
    refused(
        "gpt2 is not supported; its positions are learned, and rotate in all that are", "llama 2", model_type="gpt2"
    )
    refused("(gemma3_text)", "gemma 3", model_type="gemma3")
    refused("final_logit_softcapping: 30.0 is not supported", "gemma 3", final_logit_softcapping=30.0)
    refused("hidden_act: xielu is not supported", "llama 2", hidden_act="xielu")
    refused("layer_types: chunked_attention", "olmo 3", layer_types=["chunked_attention"] * 4)
    refused("config.json: rope_scaling.rope_type", "llama 2", rope_parameters={"rope_type": "longrope", "factor": 2.0})
    refused("partial_rotary_factor: 0.5", "llama 2", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    refused("vocab_size is missing", "llama 2", vocab_size=None)
    with pytest.raises(CheckpointError, match="padded_vocab_size 64 is less than the model's 90 tokens"):
        from_hf(config_of("llama 2").to_dict(), nothing, padded_vocab_size=64)


def test_what_no_family_computes_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"positions are alibi here \(pos_emb\); they rotate in all families"):
        hf_config(small(pos_emb="alibi"))
    with pytest.raises(CheckpointError) as learned:
        hf_config(small(pos_emb="learned"))
    assert str(learned.value) == (
        "HuggingFace has no such model:\n"
        "  positions are learned here as in GPT-2, which is not written (pos_emb); they rotate in all families "
        "that are\n"
        "  gpt_neox: positions (pos_emb): rotary there, learned here\n"
        "  llama: norms (norm): rmsnorm there, layernorm here; activation: swiglu there, gelu here; positions "
        "(pos_emb): rotary there, learned here"
    )
    with pytest.raises(CheckpointError, match=r"heads of keys \(num_kv_heads\): 4 there, 2 here"):
        hf_config(small(num_kv_heads=2), family="gpt_neox")
    with pytest.raises(CheckpointError, match="no family gpt2; one of gpt_neox, llama"):
        hf_config(small(), family="gpt2")
    with pytest.raises(CheckpointError, match="llama: .*layer_types"):
        hf_config(args_of(config_of("mistral").to_dict()), family="llama")
    with pytest.raises(CheckpointError, match="vocab_size 65: the model has 64 rows"):
        hf_config(small(), vocab_size=65)
    args = small()
    weights = random_weights(args)
    del weights[2]["mlp.linear1.bias"]
    weights[2]["mlp.linear2.bias"] = torch.zeros(31)
    with pytest.raises(CheckpointError, match=r"layer 2: mlp.linear1.bias is missing, not \(128,\), .* is \(31,\)"):
        list(to_hf(args, weights.items()))
