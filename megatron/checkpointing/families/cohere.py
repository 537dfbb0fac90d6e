"""Describes the family of Cohere's Command R7B and Command A.

Attention and MLP are parallel, after one norm. Only layers with sliding windows have rotary positions.
"""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    SLIDING,
    drop_fields,
    get,
    layer_kinds,
    needed_window,
    window_config,
    window_keys,
    window_period,
)
from megatron.checkpointing.families.family import Config, Family, TensorMapping
from megatron.checkpointing.families.llama import llama_config, llama_keys, replaced_rows
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {
    "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64, "intermediate_size": 22528,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
ROWS = replaced_rows(
    TensorMapping("input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",)),
    TensorMapping("norm.weight", ("model.norm.weight",)),
)


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config, "mlp_bias": False}
    period = window_period(config, 4)
    kinds = layer_kinds(config, lambda i: (i + 1) % period != 0)
    window = needed_window(config, 4096, kinds)
    if get(config, "use_qk_norm", False):
        raise CheckpointError("config.json: use_qk_norm: true is not supported")
    return {
        **drop_fields(llama_keys(config, _DEFAULTS), "rms_norm_epsilon"),
        **window_keys(window, kinds),
        "rotary_interleaved": True,
        "no_rope_layers": [int(kind == SLIDING) for kind in kinds],
        "norm": "layernorm",
        "layernorm_epsilon": get(config, "layer_norm_eps", 1e-5),
        "use_bias_in_norms": False,
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "logit_scale": get(config, "logit_scale", 0.0625),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(llama_config(args, head_dim=False), "rms_norm_eps"),
        "layer_norm_eps": args.layernorm_epsilon,
        **window_config(args),
        "logit_scale": args.logit_scale,
    }


COHERE2 = Family(
    "cohere2", "Cohere2ForCausalLM", ROWS, _keys, _config, title="Command R7B, Command A (Cohere 2)", has_scorer=False
)
