"""Describes the families Mamba, Falcon-Mamba and Mamba 2, whose blocks have a state instead of attention."""

import math
from collections.abc import Sequence
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import get, refuse_unless
from megatron.checkpointing.families.family import Config, Family, TensorMapping, weight_and_bias
from megatron.neox_arguments import ModelArgs

_BLOCK = "backbone.layers.{}."
# Sequence length: config.json has none, because Mamba has no positions. GPT-NeoX's configurations have this.
_LENGTH = 2048
STATE_ROWS = (
    TensorMapping("word_embeddings.weight", ("backbone.embeddings.weight",)),
    TensorMapping("norm.scale", (_BLOCK + "norm.weight",)),
    TensorMapping("mixer.A_log", (_BLOCK + "mixer.A_log",)),
    TensorMapping("mixer.D", (_BLOCK + "mixer.D",)),
    *weight_and_bias("mixer.in_proj", _BLOCK + "mixer.in_proj"),
    *weight_and_bias("mixer.conv1d", _BLOCK + "mixer.conv1d"),
    *weight_and_bias("mixer.out_proj", _BLOCK + "mixer.out_proj"),
    TensorMapping("norm.scale", ("backbone.norm_f.weight",)),
    TensorMapping("final_linear.weight", ("lm_head.weight",)),
)
_ROWS = (
    *STATE_ROWS,
    TensorMapping("mixer.x_proj.weight", (_BLOCK + "mixer.x_proj.weight",)),
    *weight_and_bias("mixer.dt_proj", _BLOCK + "mixer.dt_proj"),
)
ROWS_2 = (
    *STATE_ROWS,
    TensorMapping("mixer.dt_bias", (_BLOCK + "mixer.dt_bias",)),
    TensorMapping("mixer.norm.weight", (_BLOCK + "mixer.norm.weight",)),
)
_MAMBA = {
    "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5, "expand": 2,
    "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
}  # fmt: skip
_MAMBA2 = {
    **_MAMBA, "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
    "n_groups": 8, "chunk_size": 256, "tie_word_embeddings": False,
}  # fmt: skip


def _common_keys(config: Config, kind: str) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a model whose blocks are all of one kind: "mamba" or "mamba2".

    config: config.json, completed with the family's defaults."""
    refuse_unless(config, "hidden_act", "silu", "swish")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": max(1, hidden // 64),  # GPT-NeoX's configurations have this key; Mamba ignores it
        "max_position_embeddings": _LENGTH,
        "seq_length": _LENGTH,
        "pos_emb": "none",
        "no_weight_tying": not config["tie_word_embeddings"],
        "norm": "rmsnorm",
        "rms_norm_epsilon": config["layer_norm_epsilon"],
        "attention_config": [[[kind], layers]],
        "mamba_state_dim": config["state_size"],
        "mamba_conv_kernel": config["conv_kernel"],
        "mamba_use_bias_in_conv": config["use_conv_bias"],
        "mamba_use_bias_in_linears": config["use_bias"],
    }


def _common_config(args: ModelArgs) -> dict[str, Any]:
    """Returns the fields of config.json that Mamba and Mamba 2 share, the inverse of `_common_keys`."""
    usual = 16 if args.attention_config[0] == "mamba" else 128
    return {
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "layer_norm_epsilon": args.rms_norm_epsilon,
        "state_size": args.mamba_state_dim or usual,
        "conv_kernel": args.mamba_conv_kernel,
        "use_conv_bias": args.mamba_use_bias_in_conv,
        "use_bias": args.mamba_use_bias_in_linears,
        "hidden_act": "silu",
        "tie_word_embeddings": not args.no_weight_tying,
    }


def with_defaults(config: Config, defaults: Config) -> dict[str, Any]:
    """Returns `config` with `defaults` for fields that are absent or null."""
    return {**config, **{name: get(config, name, value) for name, value in defaults.items()}}


def _mamba_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _MAMBA)
    hidden, rank = config["hidden_size"], get(config, "time_step_rank", "auto")
    inner = get(config, "intermediate_size", config["expand"] * hidden)
    if inner % hidden:
        raise CheckpointError(f"config.json: intermediate_size: {inner} is not a multiple of hidden_size {hidden}")
    if config["use_bias"]:
        raise CheckpointError(
            "config.json: use_bias: true is not supported: transformers then gives biases to in_proj and out_proj "
            "only, but this program (mamba_use_bias_in_linears) also to x_proj"
        )
    return {
        **_common_keys(config, "mamba"),
        "mamba_expand": inner // hidden,
        "mamba_dt_rank": math.ceil(hidden / 16) if rank == "auto" else int(rank),
    }


def _mamba_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **_common_config(args),
        "expand": args.mamba_expand,
        "intermediate_size": args.mamba_inner_size,
        "time_step_rank": args.mamba_dt_rank or math.ceil(args.hidden_size / 16),
    }


MAMBA = Family(
    "mamba", "MambaForCausalLM", _ROWS, _mamba_keys, _mamba_config, title="Mamba",
    has_scorer=False, base_prefix="backbone.",
    notes="config.json has no length: 2048 here, may be any. With residual_in_fp32 transformers keeps the residual "
    "stream in fp32 beside 16-bit weights; here it has their type",
)  # fmt: skip


def _falcon_mamba_keys(config: Config) -> dict[str, Any]:
    return {**_mamba_keys(config), "mamba_bcdt_norm_epsilon": get(config, "mixer_rms_eps", 1e-6)}


def _falcon_mamba_config(args: ModelArgs) -> dict[str, Any]:
    return {**_mamba_config(args), "mixer_rms_eps": args.mamba_bcdt_norm_epsilon}


FALCON_MAMBA = Family(
    "falcon_mamba", "FalconMambaForCausalLM", _ROWS, _falcon_mamba_keys, _falcon_mamba_config, title="Falcon-Mamba",
    has_scorer=False, base_prefix="backbone.", notes="length and residual_in_fp32 as for Mamba",
)  # fmt: skip


def time_step_keys(limit: Sequence[Any]) -> dict[str, Any]:
    """Returns the NeoX key `mamba_time_step_limit`; {} for the limits (0, inf), which have no effect.

    limit: (low, high); infinity may also be `{"__float__": "Infinity"}`, as transformers 5 writes it."""
    low, high = (float(bound["__float__"] if isinstance(bound, dict) else bound) for bound in limit)
    bounds = [low] if math.isinf(high) else [low, high]
    return {} if bounds == [0.0] else {"mamba_time_step_limit": bounds}


def _mamba2_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _MAMBA2)
    inner, hidden, expand = config["num_heads"] * config["head_dim"], config["hidden_size"], config["expand"]
    if inner != hidden * expand:
        raise CheckpointError(
            f"config.json: expand: {expand} times hidden_size {hidden} must equal num_heads times head_dim, {inner}"
        )
    return {
        **_common_keys(config, "mamba2"),
        **time_step_keys(get(config, "time_step_limit", (0.0, math.inf))),
        "mamba_num_heads": config["num_heads"],
        "mamba_head_dim": config["head_dim"],
        "mamba_num_groups": config["n_groups"],
        "mamba_chunk_size": config["chunk_size"],
    }


def _mamba2_config(args: ModelArgs) -> dict[str, Any]:
    low, high = (*(args.mamba_time_step_limit or (0.0,)), math.inf)[:2]
    return {
        **_common_config(args),
        "expand": args.mamba2_heads * args.mamba_head_dim // args.hidden_size,
        "num_heads": args.mamba2_heads,
        "head_dim": args.mamba_head_dim,
        "n_groups": args.mamba_num_groups,
        "chunk_size": args.mamba_chunk_size,
        **({} if (low, high) == (0.0, math.inf) else {"time_step_limit": [low, high]}),
    }


MAMBA2 = Family(
    "mamba2", "Mamba2ForCausalLM", ROWS_2, _mamba2_keys, _mamba2_config, title="Mamba 2",
    has_scorer=False, base_prefix="backbone.",
    notes="config.json sets: biases; length and residual_in_fp32 as for Mamba",
)  # fmt: skip
