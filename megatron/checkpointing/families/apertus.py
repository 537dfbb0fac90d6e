"""Describes the Apertus family: queries and keys have norms, the ungated MLP a trained activation (xIELU)."""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import get
from megatron.checkpointing.families.family import Config, Family, TensorMapping, weight_and_bias
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, PER_HEAD, llama_config, llama_keys, replaced_rows
from megatron.model.mlp import XIELU_BETA, XIELU_EPS
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    **LLAMA_DEFAULTS, "intermediate_size": 14336, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_BLOCK = "model.layers.{}."
ROWS = replaced_rows(
    TensorMapping("input_layernorm.scale", (_BLOCK + "attention_layernorm.weight",)),
    TensorMapping("post_attention_layernorm.scale", (_BLOCK + "feedforward_layernorm.weight",)),
    *weight_and_bias("mlp.linear1", _BLOCK + "mlp.up_proj"),
    TensorMapping("mlp.act_fn.alpha_p", (_BLOCK + "mlp.act_fn.alpha_p",)),
    TensorMapping("mlp.act_fn.alpha_n", (_BLOCK + "mlp.act_fn.alpha_n",)),
)
_CONSTANTS = {_BLOCK + "mlp.act_fn.beta": XIELU_BETA, _BLOCK + "mlp.act_fn.eps": XIELU_EPS}


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config}
    act = get(config, "hidden_act", "xielu")
    if act != "xielu":
        raise CheckpointError(f"config.json: hidden_act: {act} is not supported, only xielu")
    if get(config, "post_norm", False) or not get(config, "qk_norm", True):
        raise CheckpointError("config.json: post_norm: true or qk_norm: false is not supported for Apertus")
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config["rope_parameters"] = _LLAMA3  # transformers has this default too, and then ignores rope_theta
    return {
        **llama_keys({**config, "hidden_act": "silu", "mlp_bias": False}, _DEFAULTS, theta=12000000.0),
        **PER_HEAD,
        "activation": "xielu",
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    config = llama_config(args)
    rope = {**(config["rope_scaling"] or {"rope_type": "default"}), "rope_theta": config["rope_theta"]}
    return {**config, "rope_parameters": rope, "hidden_act": "xielu"}


APERTUS = Family(
    "apertus", "ApertusForCausalLM", ROWS, _keys, _config, constants=_CONSTANTS, title="Apertus", has_scorer=False,
    notes="xIELU is computed in fp32; transformers uses the type of the weights",
)  # fmt: skip
