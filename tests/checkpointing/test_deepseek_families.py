"""DeepSeek's kin: blocks for multi-token prediction, FP8, and what transformers does not compute."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families.convert import hf_config
from megatron.checkpointing.families.registry import family_of
from megatron.checkpointing.huggingface import HFFolder
from megatron.neox_arguments import ConfigError
from tests.checkpointing.family_models import config_of
from tests.checkpointing.golden import fails
from tests.checkpointing.test_families import PUBLISHED, args_of
from tests.checkpointing.test_huggingface import model_folder, there_and_back
from tests.model.runs import LATENT
from tests.model.stages import small


@pytest.mark.parametrize(("case", "bare"), [("deepseek 3", False), ("glm 4 moe", True)])
def test_blocks_for_multi_token_prediction_are_left_out(case: str, bare: bool, tmp_path: Path) -> None:
    """bare: files of the class without a head, whose names lack a prefix."""
    folder = model_folder(tmp_path / "hf", case)
    expected = load_file(folder / "model.safetensors")
    further = {f"model.layers.4.{name}": torch.ones(3) for name in ("eh_proj.weight", "shared_head.norm.weight")}
    further["model.layers.10.enorm.weight"] = torch.ones(3)
    tensors = {**expected, **further}
    if bare:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    read = HFFolder(folder)
    assert read.left_out is not None and re.match("3 tensors of layers.4 and later are left out", read.left_out)
    assert read.shapes.keys() == expected.keys() and HFFolder(model_folder(tmp_path / "plain", case)).left_out is None
    back = there_and_back(folder, tmp_path)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert exported["num_nextn_predict_layers"] == 0, "the exported folder has no such layers"


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("deepseek 3", {"scoring_func": "softmax"}, "scoring_func: softmax is not supported, only sigmoid"),
    ("deepseek 3", {"topk_method": "greedy"}, "topk_method: greedy is not supported, only noaux_tc"),
    ("deepseek 3", {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
    ("deepseek 3", {"num_key_value_heads": 2}, "num_key_value_heads: 2"),
    ("deepseek 3", {"n_shared_experts": 0}, "n_shared_experts: 0"),
    ("deepseek 3", {"n_routed_experts": 1}, "n_routed_experts: 1"),
    ("deepseek 3", {"first_k_dense_replace": 4}, "no block has experts"),
    ("deepseek 2", {"topk_method": "noaux_tc"}, "topk_method: noaux_tc"),
    ("deepseek 2", {"norm_topk_prob": True}, "norm_topk_prob: True"),
    ("deepseek 2", {"mlp_bias": True}, "mlp_bias: True"),
    ("glm 4 moe lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
])  # fmt: skip
def test_fields_that_transformers_does_not_compute_are_refused(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
        args_of({**config_of(case).to_dict(), **changes})


def test_kin_that_are_not_read_are_named() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2}
    for model_type, difference in (
        ("deepseek_v32", "an indexer"), ("deepseek_v4", "compressed sparse attention"),
        ("glm_moe_dsa", "an indexer"), ("kimi_k2", "set model_type: deepseek_v3"),
    ):  # fmt: skip
        fails(f"model_type: {model_type} .*deepseek_v3 .*{difference}", family_of, {"model_type": model_type, **sizes})
    kimi = {**PUBLISHED["deepseek-ai/DeepSeek-V3"][1], "n_routed_experts": 384, "num_attention_heads": 64,
            "num_key_value_heads": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
    assert args_of(kimi).moe_router_num_groups is None and family_of(kimi) == "deepseek_v3"


def test_which_family_has_latent_attention() -> None:
    latent = {**LATENT, "use_bias_in_attn_linear": False}
    assert hf_config(small(**latent))["model_type"] == "youtu"
    factors = {"rotary_interleaved": False, "residual_multiplier": 0.5}
    assert hf_config(small(**{**latent, **factors}))["model_type"] == "minicpm3"
    assert "kv_lora_rank" in fails("llama: .*", hf_config, small(**latent), family="llama")
    fails(r"youtu: .*\(latent_norm_epsilon\)", hf_config, small(**latent, latent_norm_epsilon=1e-5), family="youtu")
    usual = {name: value for name, value in latent.items() if name not in (
        "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}  # fmt: skip
    fails(r"youtu: .*\(kv_lora_rank\)", hf_config, small(**usual), family="youtu")
    experts = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_intermediate_size": 16}
    uneven = small(**latent, **experts, moe_shared_expert_intermediate_size=24)
    message = r"deepseek_v3: .*\(moe_shared_expert_intermediate_size\): 16 after conversion, 24 in"
    fails(message, hf_config, uneven, family="deepseek_v3")


@pytest.mark.parametrize(("case", "field", "value"), [
    ("deepseek 3", "head_dim", 2), ("kimi linear", "tie_word_embeddings", True),
    ("gemma 3", "attn_logit_softcapping", 5.0),
])  # fmt: skip
def test_fields_that_transformers_computes_otherwise_are_refused(case: str, field: str, value: Any) -> None:
    fails(f"config.json: {field}: {value} is not supported", args_of, {**config_of(case).to_dict(), field: value})
