"""Invalid models are refused before they are built. The error names the key and its counterpart."""

import re
from typing import Any

import pytest

from megatron.neox_arguments import ConfigError
from tests.model.stages import small

SLIDING, FULL = "sliding_attention", "full_attention"
MAMBA2: dict[str, Any] = {"attention_config": ["mamba2", "flash"], "mamba_head_dim": 8}
TP2: dict[str, Any] = {"model_parallel_size": 2}
NEFTUNE: dict[str, Any] = {"neftune_noise_alpha": 7.0}
# Keys, the one that the line begins with, and the facts it gives.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"num_kv_heads": [2, 4, 2]}, "num_kv_heads", "3 .*num_layers.* 2"),
    ({"num_kv_heads": [2, 3]}, "num_kv_heads", "3 .*num_attention_heads 4"),
    ({"num_kv_heads": [4, 0]}, "num_kv_heads", "at least 1"),
    ({"num_kv_heads": [6, 3], "num_attention_heads": 6, "hidden_size": 48, **TP2}, "model_parallel_size",
     "2 .*num_kv_heads"),
    ({"num_kv_heads": 1, "head_dim": 6, "model_parallel_size": 4}, "model_parallel_size", "4 .*head_dim.* 1"),
    ({"num_kv_heads": 1, "te_mha": True, **TP2}, "model_parallel_size", "2 .*num_kv_heads.*te_mha"),
    ({"intermediate_size": [48, 49], **TP2}, "intermediate_size", "49"),
    ({"intermediate_size": [48, "wide"]}, "intermediate_size", "expected int"),
    ({"layer_types": [SLIDING]}, "layer_types", "sliding_attention .*sliding_window_width"),
    ({"layer_types": [FULL], "sliding_window_width": 4}, "sliding_window_width", "layer_types"),
    ({"layer_types": [FULL] * 3}, "layer_types", "3 .*num_layers.* 2"),
    ({"layer_types": ["local"]}, "layer_types", f"{FULL} or {SLIDING}"),
    ({"no_rope_layers": [1, 2]}, "no_rope_layers", "0 and 1"),
    ({"no_rope_layers": [1], "pos_emb": "alibi"}, "no_rope_layers", "pos_emb: rotary"),
    ({"rope_local_base_freq": 100}, "rope_local_base_freq", "pos_emb: rotary .*sliding_attention"),
    ({"zero_centered_gamma": True, "norm": "scalenorm"}, "zero_centered_gamma", "rmsnorm or layernorm, not scalenorm"),
    ({"qk_norm_per_head": True}, "qk_norm_per_head", "use_separate_qk_norms: true"),
    ({"qk_norm_after_rotary": True}, "qk_norm_after_rotary", "use_separate_qk_norms: true"),
    ({"qk_norm_after_rotary": True, "clip_qkv": 1.0}, "qk_norm_after_rotary", "clip_qkv .*remove one"),
    ({"head_dim": 7}, "pos_emb", "7 of the 7"),
    ({"norm_placement": "sandwich", "gpt_j_residual": True}, "norm_placement", "sandwich .*gpt_j_residual"),
    ({"kv_channels": 4}, "kv_channels", "head_dim"),
    ({"attention_sinks": True, "attention_dropout": 0.1}, "attention_sinks", "attention_dropout"),
    ({"attention_sinks": True, "te_mha": True}, "attention_sinks", "Transformer-Engine"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "truncate": False}}, "rope_scaling.truncate", "linear"),
    ({**NEFTUNE, "train_impl": "kto", "pack_impl": "best_fit"}, "neftune_noise_alpha", "fine-tuning"),
    ({**NEFTUNE, "pack_impl": "best_fit"}, "neftune_noise_alpha", "length .*reset_attention_mask: true"),
    ({**NEFTUNE, "pack_impl": "unpacked"}, "neftune_noise_alpha", "length"),
    ({"attention_config": ["mamba2", "flash"]}, "mamba_num_groups", "8 .* 1 heads"),
    ({**MAMBA2, "mamba_num_groups": 3, "mamba_num_heads": 6, **TP2}, "mamba_num_groups", "3 .*model_parallel_size 2"),
    ({**MAMBA2, "mamba_num_groups": 1, "mamba_num_heads": 3, **TP2}, "mamba_num_heads", "3 .*model_parallel_size 2"),
    ({**MAMBA2, "mamba_num_groups": 1, "mamba_state_dim": 5, **TP2}, "mamba_state_dim", "5 .*model_parallel_size 2"),
    ({**MAMBA2, "attention_config": ["mamba", "mamba2"], "mamba_num_heads": 8, "mamba_expand": 1, "hidden_size": 30,
      "head_dim": 8, "model_parallel_size": 4}, "mamba_expand", "30 .*model_parallel_size 4"),
    ({**MAMBA2, "mamba_num_heads": 8, "mamba_expand": 3}, "mamba_expand", "mamba_num_heads 8"),
    ({**MAMBA2, "mamba_backend": "fla", "precision": "bfloat16"}, "mamba_backend", "fla.*mamba_state_fp32: false"),
    ({"mamba_state_dim": 4}, "mamba_state_dim", "attention_config .*mamba or mamba2"),
    ({"attention_config": ["mamba", "mamba"], "mamba_head_dim": 8}, "mamba_head_dim", "mamba2"),
    ({"attention_config": ["moe", "flash"]}, "moe_num_experts", "above 1.* moe"),
    ({"attention_config": ["mamba", "rwkv7"]}, "attention_config", "mamba2, .*attention, mlp or moe"),
    ({"attention_config": ["mamba", "mamba"], "lora": {"target": ["out_proj"]}}, "lora.target", "in_proj, x_proj"),
    ({"lora": {"target": ["layers.2.self_attn.q_proj"]}}, "lora.target", "layers.2"),
    ({"lora": {"layers_to_transform": [0, 2]}}, "lora.layers_to_transform", "num_layers"),
    ({"lora": {"layers_to_transform": 1, "rank_pattern": {r"layers\.0\..*": 2}}}, "lora.rank_pattern", "layers"),
    ({"lora": {"rank_pattern": {"q_proj": 1.5}}}, "lora.rank_pattern", "q_proj.*1.5"),
    ({"lora": {"alpha_pattern": {"(q_proj": 2}}}, "lora.alpha_pattern", "regular expression"),
]  # fmt: skip


@pytest.mark.parametrize("keys, at_fault, facts", REFUSED)
def test_what_does_not_fit_is_refused(keys: dict[str, Any], at_fault: str, facts: str) -> None:
    with pytest.raises(ConfigError) as refused:
        small(**keys)
    assert re.search(rf"(^|: ){re.escape(at_fault)}: .*{facts}", str(refused.value), re.MULTILINE), refused.value


def test_what_fits_is_taken() -> None:
    small(**NEFTUNE, reset_attention_mask=True, pack_impl="best_fit")
