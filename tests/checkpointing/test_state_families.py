"""HuggingFace's families of Mamba and of hybrids: fields, older spellings, refusals, and carried tensors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpointing import CheckpointError, check_model, model_keys, saved_model
from megatron.checkpointing.families.canonical_config import canonical_config
from megatron.checkpointing.families.convert import hf_config
from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.family_models import VOCAB, config_of, ours_of, random_model
from tests.checkpointing.family_runs import TOKENS, logits_of
from tests.checkpointing.golden import fails
from tests.checkpointing.test_families import args_of
from tests.checkpointing.test_huggingface import imported, same_bits, tensors_of, there_and_back
from tests.model.stages import small

FULL, LINEAR = "full_attention", "linear_attention"


def config(case: str, **changes: Any) -> dict[str, Any]:
    return {**config_of(case).to_dict(), **changes}


@pytest.mark.parametrize(("case", "changes"), [
    ("mamba 2", {"n_groups": 1, "chunk_size": 7}),
    ("mamba 2", {"n_groups": 2, "chunk_size": 3, "time_step_limit": (0.0, float("inf"))}),
    ("nemotron h", {"n_group": 1, "topk_group": 1, "mlp_hidden_act": "gelu"}),
    ("nemotron h", {"layers_block_type": ["moe", LINEAR], "norm_topk_prob": False}),
    ("nemotron h", {"layers_block_type": [LINEAR, LINEAR], "time_step_min": 1e-30}),
    ("nemotron h", {"layers_block_type": [FULL, "mlp"]}),
])  # fmt: skip
def test_groups_of_heads_and_hybrids_of_several_kinds(case: str, changes: dict[str, Any]) -> None:
    model = random_model(case, **changes)
    logits = logits_of(*ours_of(model), ParallelGroups.single())[..., :VOCAB]
    with torch.no_grad():
        assert (logits - model(TOKENS, use_cache=False).logits).abs().max() < 1e-5


def test_older_spellings_of_config_json() -> None:
    now = config("nemotron h")
    assert now["layers_block_type"] == [LINEAR, "moe", FULL, "mlp", LINEAR, "moe"]
    expected = canonical_config(args_of(now))
    old_names = ["mamba", "moe", "attention", "mlp", "mamba", "moe"]
    old_config = {
        name: value for name, value in now.items() if name not in ("layers_block_type", "head_dim", "n_groups")
    }
    old_config |= {"head_dim": 6, "mamba_n_groups": 4, "rms_norm_eps": 0.5, "rope_theta": 10000, "num_hidden_layers": 6}
    for spelt in (
        {"layers_block_type": old_names}, {"layer_types": old_names}, {"hybrid_override_pattern": "ME*-ME"},
        {"layers_block_type": now["layers_block_type"], "hybrid_override_pattern": "MMMM"},  # the former counts
    ):  # fmt: skip
        assert canonical_config(args_of({**old_config, **spelt})) == expected, spelt
        hf_args = transformers.AutoConfig.for_model(**{**old_config, **spelt})
        assert hf_args.layers_block_type == now["layers_block_type"]
        assert (hf_args.n_groups, hf_args.layer_norm_epsilon) == (4, args_of(now).rms_norm_epsilon)
    reordered = args_of({**old_config, "hybrid_override_pattern": "ME*-EM"})
    assert canonical_config(reordered) != expected and canonical_config(args_of({**now, "n_groups": 2})) != expected
    assert reordered.attention_config == ("mamba2", "moe", "attention", "mlp", "moe", "mamba2")
    written = hf_config(reordered)
    assert written["hybrid_override_pattern"] == "ME*-EM" and written["num_hidden_layers"] == 6
    finite = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert args_of(config("mamba 2", **finite)).mamba_time_step_limit is None
    assert args_of(config("mamba 2", time_step_limit=[0.1, 2.0])).mamba_time_step_limit == (0.1, 2.0)
    published = config("mamba", d_inner=64, d_model=32, n_layer=4, rms_norm=True, ssm_cfg={}, fused_add_norm=True)
    assert canonical_config(args_of(published)) == canonical_config(args_of(config("mamba")))


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("mamba", {"use_bias": True}, "use_bias: true"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act: gelu"),
    ("falcon mamba", {"intermediate_size": 40}, "intermediate_size: 40"),
    ("mamba 2", {"hidden_act": "relu"}, "hidden_act: relu"),
    ("mamba 2", {"expand": 3}, "expand: 3 "),
    ("nemotron h", {"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type: rwkv"),
    ("nemotron h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "hybrid_override_pattern: X"),
    ("nemotron h", {"attention_bias": True}, "attention_bias: True"),
    ("nemotron h", {"tie_word_embeddings": True}, "tie_word_embeddings: True"),
    ("nemotron h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act: gelu"),
    ("nemotron h", {"sliding_window": 8}, "sliding_window: 8"),
    ("nemotron h", {"mlp_bias": True}, "mlp_bias: true"),
    ("nemotron h", {"n_shared_experts": 2}, "n_shared_experts: 2"),
    ("nemotron h", {"n_routed_experts": 1}, "n_routed_experts: 1"),
    ("nemotron h", {"mlp_hidden_act": "xielu"}, "mlp_hidden_act: xielu"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_by_field(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)) as caught:
        args_of(config(case, **changes))
    assert "\n" not in str(caught.value)


def test_which_family_has_which_blocks() -> None:
    def refused(args: NeoXArgs, **kwargs: Any) -> list[str]:
        return fails(".", hf_config, args, **kwargs).splitlines()[1:]

    common: dict[str, Any] = {"norm": "rmsnorm", "pos_emb": "none"}
    mamba_1 = small(**common, attention_config=["mamba", "mamba"])
    assert hf_config(mamba_1)["model_type"] == "mamba" and hf_config(mamba_1)["time_step_rank"] == 2
    # What is attention's alone says nothing here.
    assert hf_config(mamba_1.replace(pos_emb="rotary", num_attention_heads=8))["model_type"] == "mamba"
    normed = mamba_1.replace(mamba_bcdt_norm_epsilon=1e-5)
    assert hf_config(normed)["model_type"] == "falcon_mamba" and hf_config(normed)["mixer_rms_eps"] == 1e-5
    heads = {"mamba_head_dim": 8, "mamba_num_groups": 2}
    mamba_2 = small(**common, **heads, attention_config=["mamba2", "mamba2"])
    assert hf_config(mamba_2)["model_type"] == "mamba2" and "time_step_limit" not in hf_config(mamba_2)
    assert hf_config(mamba_2.replace(mamba_time_step_limit=[0.0, 0.5]))["time_step_limit"] == [0.0, 0.5]
    assert hf_config(mamba_2.replace(mamba_num_heads=6, no_weight_tying=True))["mamba_num_heads"] == 6
    messages = refused(mamba_1.replace(mamba_use_bias_in_linears=True))
    assert "mamba: " in messages[0] and "use_bias: true" in messages[0]
    messages = refused(mamba_1.replace(norm="layernorm"))
    assert re.search(r"mamba: .*\(norm\): rmsnorm .*layernorm", messages[0])
    mixed = small(**common, **heads, attention_config=["mamba2", "global"])
    (messages,) = refused(mixed, family="nemotron_h")
    assert re.search(r"nemotron_h: .*global.*\(attention_config\)", messages)
    hybrid = small(**common, **heads, attention_config=["mamba2", "attention"], no_weight_tying=True)
    assert re.search(r"nemotron_h: .*\(use_bias_in_attn_linear\).*; ", refused(hybrid)[0])
    assert re.search(r" mamba2 .*\['mamba2', 'attention'\]", refused(hybrid, family="mamba2")[0])
    low_and_high = hybrid.replace(use_bias_in_attn_linear=False, mamba_time_step_limit=[0.1, 0.5])
    (messages,) = refused(low_and_high, family="nemotron_h")
    assert re.search(r"\(mamba_time_step_limit\): \(0.1, inf\) .*\(0.1, 0.5\)", messages)
    # A family of attention says what its blocks are, not all that follows.
    (messages,) = refused(mamba_1, family="llama")
    assert re.search(r"llama: .*\(attention_config\): global ", messages) and "mamba_" not in messages


def nemotron_folder(path: Path) -> dict[str, Tensor]:
    """A folder as published: bf16 with biases of experts in fp32, and layers that predict further tokens."""
    random_model("nemotron h", torch.bfloat16).save_pretrained(path)
    tensors, generator = tensors_of(path), torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("e_score_correction_bias", "A_log"))]:
        tensors[name] = tensors[name].float() * 1.001
    shapes = {"eh_proj.weight": (32, 64), "mixer.experts.1.up_proj.weight": (20, 32), "norm.weight": (32,)}
    for name, shape in shapes.items():
        tensors[f"mtp.layers.0.{name}"] = torch.randn(shape, generator=generator).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    file = path / "config.json"
    fields = {name: value for name, value in json.loads(file.read_text()).items() if name != "layers_block_type"}
    fields |= {"hybrid_override_pattern": "ME*-ME", "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    file.write_text(json.dumps(fields))
    return tensors


@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_of_further_tokens_are_carried_along(tensor: int, tmp_path: Path) -> None:
    tensors = nemotron_folder(tmp_path / "hf")
    folder = HFFolder(tmp_path / "hf")
    assert set(folder.carried) == {name for name in tensors if name.startswith("mtp.")} and len(folder.carried) == 3
    path, args = imported(folder, tmp_path / "ours", tensor=tensor)
    assert args.moe_router_bias_update_rate == 0.0 and args.has_experts(1)
    export_hf(path, args, tmp_path / "back")
    assert same_bits(tensors_of(tmp_path / "back"), tensors)
    original, exported = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert {name: exported.get(name) for name in original} == original
    export_hf(path, args, tmp_path / "named", family="nemotron_h", dtype=torch.float32)
    wide = tensors_of(tmp_path / "named")
    assert wide["lm_head.weight"].dtype == torch.float32
    assert all(torch.equal(value, tensors[name]) for name, value in wide.items() if name.startswith("mtp."))
    assert wide.keys() == tensors.keys()


def test_names_in_memory_are_read_too(tmp_path: Path) -> None:
    """transformers 5 has `model.` in the place of `backbone.`, and experts in one tensor."""
    for kinds in ([LINEAR, "moe"], [LINEAR, "mlp"]):
        model = random_model("nemotron h", layers_block_type=kinds)
        model.save_pretrained(tmp_path / "files")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert "model.embeddings.weight" in state
        assert ("model.layers.1.mixer.experts.up_proj" in state) == ("moe" in kinds)
        (tmp_path / "memory").mkdir(exist_ok=True)
        save_file(state, tmp_path / "memory" / "model.safetensors", {"format": "pt"})
        (tmp_path / "memory" / "config.json").write_bytes((tmp_path / "files" / "config.json").read_bytes())
        opened = HFFolder(tmp_path / "memory")
        expected = tensors_of(tmp_path / "files")
        assert opened.shapes == {name: tuple(value.shape) for name, value in expected.items()}
        assert all(torch.equal(opened.get(name), value) for name, value in expected.items())
        import_hf(opened, tmp_path / "ours")


@pytest.mark.parametrize("case", ["mamba", "falcon mamba", "mamba 2", "nemotron h"])
def test_bits_of_a_checkpoint_in_16_bits(case: str, tmp_path: Path) -> None:
    """A_log and D in fp32 beside bf16, as training leaves them."""
    random_model(case, torch.bfloat16).save_pretrained(tmp_path / "hf")
    tensors = tensors_of(tmp_path / "hf")
    for name in [name for name in tensors if name.endswith(("A_log", ".D"))]:
        tensors[name] = tensors[name].float() * 1.001
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert same_bits(there_and_back(tmp_path / "hf", tmp_path, tensor=2, pipe=2), tensors)


def test_one_bias_of_experts_decides_the_choice() -> None:
    """The check of an import sees it: transformers has it as a buffer."""
    keys, weights = ours_of(random_model("nemotron h"))
    logits_before = logits_of(keys, weights, ParallelGroups.single())
    weights[3]["mlp.router.expert_bias"][5] += 3.0
    assert (logits_of(keys, weights, ParallelGroups.single()) - logits_before).abs().max() > 1e-3


def test_a_checkpoint_names_the_blocks_that_it_is_of(tmp_path: Path) -> None:
    """The error names keys that no shape shows; attention heads are left out where there is no attention."""
    random_model("nemotron h").save_pretrained(tmp_path / "hf")
    path, args = imported(tmp_path / "hf", tmp_path / "ours")
    saved = saved_model(path)
    check_model(saved, args, "it")
    for changes, key in (
        ({"attention_config": ["mamba2", "moe", "attention", "mlp", "moe", "mamba2"]}, "attention_config"),
        ({"mamba_num_groups": 2, "mamba_state_dim": 12}, "mamba_num_groups"),
        ({"mamba_time_step_limit": None}, "mamba_time_step_limit"),
    ):
        fails(key, check_model, saved, args.replace(**changes), "it")
    mamba_args = small(norm="rmsnorm", pos_emb="none", attention_config=["mamba", "mamba"])
    check_model(model_keys(mamba_args), mamba_args.replace(num_attention_heads=2), "it")
    fails(
        "mamba_bcdt_norm_epsilon",
        check_model,
        model_keys(mamba_args),
        mamba_args.replace(mamba_bcdt_norm_epsilon=1e-5),
        "it",
    )
