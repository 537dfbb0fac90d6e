"""Configurations and tensors of HuggingFace's families, both ways: names, bits, sizes and refusals."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families.canonical_config import canonical_config
from megatron.checkpointing.families.convert import (
    check_hf_tensors,
    from_hf,
    hf_config,
    hf_shapes,
    to_hf,
    unchanged_family,
)
from megatron.checkpointing.families.registry import FAMILIES, family_of
from megatron.model import build_stage, freeze, layer_params
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.family_models import CASES, PADDED, VOCAB, collected, config_of, on_disk, random_model
from tests.checkpointing.golden import fails
from tests.checkpointing.published_models import PUBLISHED
from tests.model.stages import random_weights, small

# Cases that a simpler family computes too, which is then the one that is written.
SIMPLER = dict.fromkeys(("mistral full", "phi 3 short", "seed oss biases"), "llama")
SIMPLER |= {"phi 3": "mistral", "seed oss": "qwen2", "qwen 3.5 moe": "qwen3_next", "helium": "glm",
            "solar open": "glm4_moe", "falcon heads": "gpt_neox", "ministral": "smollm3",
            "gemma 4 unified": "gemma4_text"}  # fmt: skip
SIMPLER |= dict.fromkeys(("cwm", "cwm plain"), "smollm3")


def refuse_read(name: str) -> Tensor:
    raise AssertionError(f"{name} was read")


def args_of(config: dict[str, Any], **overrides: Any) -> NeoXArgs:
    return NeoXArgs.from_dict({**from_hf(config, refuse_read)[0], **overrides})


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_changes_no_bit(case: str) -> None:
    dtype = (torch.float32, torch.bfloat16)[[*CASES].index(case) % 2]
    config, hf_tensors = on_disk(random_model(case, dtype))
    keys, tensors = from_hf(config, hf_tensors.__getitem__, padded_vocab_size=PADDED)
    weights = collected(tensors)
    args = NeoXArgs.from_dict(keys)
    expected_names = {n: {s.name for s in specs} for n, specs in layer_params(args).items() if specs}
    assert expected_names == {n: {*t} for n, t in weights.items()}
    back = dict(to_hf(args, weights.items(), family=config["model_type"], vocab_size=VOCAB))
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
    hf_fields = transformers.AutoConfig.for_model(**hf_config(args, family=config["model_type"])).to_dict()
    assert canonical_config(args_of(hf_fields)) == canonical_config(args)
    for name in ("rope_parameters", "layer_types", "sliding_window", "no_rope_layers", "num_key_value_heads"):
        for rope in (hf_fields[name], config[name]) if name == "rope_parameters" and name in hf_fields else ():
            rope.pop("type", None)  # transformers' older name for rope_type, which it keeps beside it
        assert hf_fields.get(name) == config.get(name), name


# transformers' defaults that are refused: HunYuan MoE's single expert, Gemma 4's embeddings in each layer.
_REFUSED_DEFAULTS = {"HunYuanMoEV1Config", "Gemma4TextConfig"}


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES.values()} - _REFUSED_DEFAULTS))
def test_what_config_json_leaves_out_is_the_default_of_transformers(kind: str) -> None:
    full_config = getattr(transformers, kind)().to_dict()
    minimal_config = {"model_type": full_config["model_type"], "vocab_size": full_config["vocab_size"]}
    assert canonical_config(args_of(minimal_config)) == canonical_config(args_of(full_config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_on_the_meta_device(name: str) -> None:
    parameters, config = PUBLISHED[name]
    args = args_of(config)
    stage = build_stage(args, ParallelGroups.single(torch.device("meta")))
    assert sum(param.numel() for param in stage.parameters()) == parameters
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    # Those of experts, and factors of blocks, are parameters here.
    names = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    biases = [buffer for buffer_name, buffer in model.named_buffers() if buffer_name.endswith(names)]
    assert sum(tensor.numel() for tensor in (*model.parameters(), *biases)) == parameters
    # transformers 5 writes it otherwise
    assert canonical_config(args_of(model.config.to_dict())) == canonical_config(args)
    kind = config["model_type"]
    written = sum(torch.Size(shape).numel() for shape in hf_shapes(args, family=kind).values())
    assert written == parameters + args.num_layers * len(FAMILIES[kind].constants)
    assert unchanged_family(args, config) == kind


def test_two_last_layers_and_the_tied_head_of_smollm3() -> None:
    args = args_of(PUBLISHED["HuggingFaceTB/SmolLM3-3B"][1]).replace(trainable={"last_layers": 2, "head": True})
    stage = build_stage(args, ParallelGroups.single(torch.device("meta")))
    freeze(stage_parameters(stage), args)
    trained = sum(param.numel() for param in stage.parameters() if param.requires_grad)
    total = sum(param.numel() for param in stage.parameters())
    assert (trained, total, f"{trained / total:.2%}") == (418_914_304, 3_075_098_624, "13.62%")


def test_tensors_are_read_one_by_one() -> None:
    config, hf_tensors = on_disk(random_model("llama 3"))
    requested: list[str] = []

    def get(name: str) -> Tensor:
        requested.append(name)
        return hf_tensors[name]

    _, tensors = from_hf(config, get)
    assert requested == []
    assert next(tensors)[:2] == (0, "word_embeddings.weight") and len(requested) == 1
    names = [(layer, name) for layer, name, _ in tensors]
    assert names[-2:] == [(7, "norm.scale"), (8, "final_linear.weight")] and len(requested) == len(hf_tensors)
    args = NeoXArgs.from_dict(from_hf(config, refuse_read)[0])
    layers_read: list[int] = []

    def layers() -> Any:
        for layer, weights in random_weights(args).items():
            layers_read.append(layer)
            yield layer, weights

    written = to_hf(args, layers())
    assert next(written)[0] == "model.embed_tokens.weight" and layers_read == [0]


def test_added_rows_are_the_mean_of_the_others() -> None:
    config, hf_tensors = on_disk(random_model("mistral"))
    _, tensors = from_hf(config, hf_tensors.__getitem__, padded_vocab_size=PADDED)
    head = collected(tensors)[8]["final_linear.weight"]
    mean = hf_tensors["lm_head.weight"].mean(0)
    assert head.shape[0] == PADDED and torch.equal(head[:VOCAB], hf_tensors["lm_head.weight"])
    torch.testing.assert_close(head[VOCAB:], mean.expand(PADDED - VOCAB, -1))


def broken(case: str, change: Any) -> str:
    """Returns the message of `check_hf_tensors` for a damaged folder."""
    config, hf_tensors = on_disk(random_model(case))
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()}
    check = partial(check_hf_tensors, config, from_hf(config, refuse_read)[0], shapes, "folder")
    check()
    change(shapes)
    return fails(".", check)


def test_missing_and_extra_tensors_are_told_by_kind() -> None:
    def change(shapes: dict[str, Any]) -> None:
        for i in (1, 3):
            del shapes[f"model.layers.{i}.mlp.up_proj.weight"]
        shapes["model.layers.0.self_attn.sinks"] = (8,)
        shapes["model.norm.weight"] = (31,)
        shapes["model.rotary_emb.inv_freq"] = (2,)  # a buffer

    missing, extra, reshaped = broken("llama 3", change).splitlines()[1:]
    assert re.search(r"missing model.layers.N.mlp.up_proj.weight .* 1, 3\)", missing)
    assert re.search(r"extra model.layers.N.self_attn.sinks .* 0\)", extra)
    assert re.search(r"model.norm.weight: .*\(31,\).*\(32,\)", reshaped)


def test_a_head_that_is_not_there_is_tied_and_other_tensors_are_skipped() -> None:
    """Buffers of old Pythia files, and the head of a tied model, as transformers skips them."""
    assert "tie_word_embeddings" in broken("qwen 3 windows", lambda shapes: shapes.pop("lm_head.weight"))
    buffers = {f"gpt_neox.layers.0.attention.{name}": (1,) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")}
    for case, extra_shapes in (("gpt_neox", buffers), ("qwen 3", {"lm_head.weight": (VOCAB, 32)})):
        config, hf_tensors = on_disk(random_model(case))
        shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()} | extra_shapes
        check_hf_tensors(config, from_hf(config, refuse_read)[0], shapes, "folder")


def test_what_cannot_be_read_is_refused() -> None:
    def refused(message: str, case: str, **changes: Any) -> None:
        with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
            from_hf({**config_of(case).to_dict(), **changes}, refuse_read)

    assert family_of({"model_type": "olmo3"}) == "olmo3" and set(FAMILIES) > {"llama", "gemma3_text"}
    refused("hidden_act: xielu", "llama 2", hidden_act="xielu")
    refused("layer_types: chunked_attention", "olmo 3", layer_types=["chunked_attention"] * 4)
    refused("config.json: rope_scaling.rope_type", "llama 2", rope_parameters={"rope_type": "other", "factor": 2.0})
    refused("long_factor is missing", "phi 3 long", rope_parameters={"rope_type": "longrope", "short_factor": [1.0]})
    refused("partial_rotary_factor: 0.5", "llama 2", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    windows = {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}
    refused("sliding_window must not be null", "cwm", **windows)
    refused("sliding_window_pattern: LLLG", "exaone 4", sliding_window_pattern="LLLG", layer_types=None)
    refused("qk_layernorm: True", "stablelm", qk_layernorm=True)
    refused("new_decoder_architecture: True", "falcon", new_decoder_architecture=True)
    refused("alibi: True", "falcon", alibi=True)
    refused("head_dim: 5", "helium", head_dim=5)
    refused("use_bias: True", "ernie 4.5 moe", use_bias=True)
    refused("output_router_logits: True", "ernie 4.5 moe", output_router_logits=True)
    refused("scoring_func: softmax", "minimax m2", scoring_func="softmax")
    refused("output_router_logits: True", "hunyuan moe", output_router_logits=True)
    refused("moe_topk: [1, 2, 2, 2]", "hunyuan moe", moe_topk=[1, 2, 2, 2])
    refused("num_experts: 1;", "hunyuan moe", num_experts=1)
    alpha = {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0}
    refused("head_dim is missing", "hunyuan", head_dim=None, rope_parameters=alpha)
    refused("use_bidirectional_attention: True", "gemma 1", use_bidirectional_attention=True)
    for name, value in (("hidden_size_per_layer_input", 8), ("num_kv_shared_layers", 2), ("enable_moe_block", True),
                        ("use_bidirectional_attention", "all"), ("rope_scaling", {"rope_type": "linear"})):  # fmt: skip
        refused(f"{name}: ", "gemma 4", **{name: value})
    refused("per_layer_config.1: hidden_size", "gemma 4", per_layer_config={"1": {"hidden_size": 8}})
    refused("head_dim differs between full_attention", "gemma 4", per_layer_config={"1": {"head_dim": 8}})
    refused(
        "rope_parameters.sliding_attention.rope_theta is missing", "gemma 4", rope_parameters={"full_attention": {}}
    )
    refused("vocab_size is missing", "llama 2", vocab_size=None)
    fails("padded_vocab_size 64.* 90", from_hf, config_of("llama 2").to_dict(), refuse_read, padded_vocab_size=64)


def test_what_no_family_computes_is_refused() -> None:
    _, summary, *nearest = fails(".", hf_config, small(pos_emb="alibi")).splitlines()
    assert "alibi" in summary and "pos_emb" in summary
    assert re.search("gpt_neox: .*rotary .*alibi", nearest[0]) and re.search("gpt2: .*learned .*alibi", nearest[1])
    fails(r"\(num_kv_heads\): 4 .* 2 ", hf_config, small(num_kv_heads=2), family="gpt_neox")
    fails("gpt3: .* gpt_neox, gpt2, llama", hf_config, small(), family="gpt3")
    with pytest.raises(CheckpointError, match="llama: .*layer_types"):
        hf_config(args_of(config_of("mistral").to_dict()), family="llama")
    fails("vocab_size 65: .* 64 ", hf_config, small(), vocab_size=65)
    args = small()
    weights = random_weights(args)
    del weights[2]["mlp.linear1.bias"]
    weights[2]["mlp.linear2.bias"] = torch.zeros(31)
    with pytest.raises(CheckpointError, match=r"layer 2: .*mlp.linear1.bias .*\(128,\), .* \(31,\)"):
        list(to_hf(args, weights.items()))


def test_models_of_other_families_are_told_the_nearest() -> None:
    def nearest_family(name: str) -> str:
        message = fails(".", family_of, getattr(transformers, name)().to_dict())
        assert "\n" not in message
        return message.partition("nearest to ")[2]

    assert re.match("config.json is gpt_neox .*one norm for attention", nearest_family("GPTJConfig"))
    assert re.match("config.json is mixtral .*one expert per token", nearest_family("Llama4TextConfig"))
    for name, nearest in (("DeepseekV32Config", "deepseek_v3"), ("DeepseekV4Config", "deepseek_v3"),
                          ("PhimoeConfig", "mixtral")):  # fmt: skip
        assert nearest_family(name).startswith(f"config.json is {nearest} ("), name
    assert nearest_family("JetMoeConfig").startswith("config.json is ")
    for name, differs in (("VaultGemmaConfig", "norms"),
                          ("FalconH1Config", "Mamba 2"),
                          ("Emu3Config", "vq_config"), ("InternLM3Config", "biases")):  # fmt: skip
        assert differs in nearest_family(name).partition("): ")[2], name
    unknown = {**config_of("llama 2").to_dict(), "model_type": "mine"}
    fails("no field differs.*model_type: llama", family_of, unknown)
    assert nearest_family("Qwen2VLConfig").startswith("config.json: text_config is qwen2 ")
    fails("model_type: resnet .*gpt_neox, gpt2, llama", family_of, {"model_type": "resnet"})


def test_fields_are_read_as_transformers_reads_them() -> None:
    def keys_of(case: str, **changes: Any) -> dict[str, Any]:
        return from_hf({**config_of(case).to_dict(), **changes}, refuse_read)[0]

    assert keys_of("qwen 2", num_key_value_heads=None)["num_kv_heads"] == 8
    assert keys_of("qwen 3.5 moe", norm_topk_prob=False)["norm_topk_prob"]  # transformers reads no such field
    assert "head_dim" not in keys_of("seed oss", head_dim=None)
    assert keys_of("llama 2", rope_parameters={"rope_theta": None, "rope_type": "default"})["rotary_emb_base"] == 10000
    stretched = keys_of("phi 3 long", original_max_position_embeddings=16)["rope_scaling"]
    assert stretched["original_max_position_embeddings"] == 16  # the outer one wins
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    fails("llama_4_scaling_beta", keys_of, "ministral 3", rope_parameters=rope)
    fails("llama_4_scaling_beta", keys_of, "mistral", rope_parameters={"rope_type": "yarn", "factor": 2.0, **rope})
    mrope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [1, 0, 0],
             "mrope_interleaved": True}  # fmt: skip
    assert keys_of("qwen 3.5", rope_parameters=mrope)["rope_scaling"].keys() == {
        "rope_type", "factor", "original_max_position_embeddings"
    }  # fmt: skip
    config = {**config_of("apertus").to_dict(), "rope_parameters": None, "rope_theta": 5000.0}
    hf_rope = transformers.AutoConfig.for_model(**config).rope_parameters
    assert from_hf(config, refuse_read)[0]["rotary_emb_base"] == hf_rope["rope_theta"] == 12000000.0
