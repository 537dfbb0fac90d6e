"""Describes GLM 4, in its versions of 2024 and of April 2025 (0414).

Half of each head has rotary positions, which rotate neighbouring dimensions together. The later version also
has norms after attention and MLP.
"""

from typing import Any

from megatron.checkpointing.families.config_fields import get, rope_keys, rope_of
from megatron.checkpointing.families.family import GATE_UP, Config, Family, TensorMapping
from megatron.checkpointing.families.llama import common_keys, llama_config, replaced_rows
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 13696, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
}  # fmt: skip
_BLOCK = "model.layers.{}."
_FUSED = TensorMapping("mlp.linear1.weight", (_BLOCK + "mlp.gate_up_proj.weight",), GATE_UP)
ROWS = replaced_rows(
    # GLM's post_attention_layernorm stands before the MLP, so our name for it is pre_feedforward_layernorm.
    TensorMapping("post_attention_layernorm.scale", (_BLOCK + "post_self_attn_layernorm.weight",)),
    TensorMapping("pre_feedforward_layernorm.scale", (_BLOCK + "post_attention_layernorm.weight",)),
    TensorMapping("post_feedforward_layernorm.scale", (_BLOCK + "post_mlp_layernorm.weight",)),
    _FUSED,
)


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, "partial_rotary_factor": 0.5, **config}
    return {
        **common_keys({**config, "attention_bias": False, "mlp_bias": False}, _DEFAULTS),
        **rope_keys(config, rope_of(config, theta=10000.0), partial=True),
        "rotary_interleaved": True,
        "add_qkv_bias": get(config, "attention_bias", True),
    }


def _glm4_keys(config: Config) -> dict[str, Any]:
    return {**_keys(config), "norm_placement": "sandwich"}


def _config(args: ModelArgs) -> dict[str, Any]:
    biases = args.add_qkv_bias or args.use_bias_in_attn_linear
    return {**llama_config(args, partial=True), "attention_bias": biases}


GLM4 = Family("glm4", "Glm4ForCausalLM", ROWS, _glm4_keys, _config, title="GLM 4 (0414)")
GLM = Family("glm", "GlmForCausalLM", replaced_rows(_FUSED), _keys, _config, title="GLM 4 (2024)")
