"""Describes Granite 3, dense and with experts: LLaMA's blocks with four factors. Granite 4 has Mamba 2 too.

The factors scale embeddings, attention logits, the outputs of mixer and MLP, and logits.
"""

import math
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import FULL, drop_fields, get, number, refuse_unless
from megatron.checkpointing.families.experts import expert_config, expert_keys
from megatron.checkpointing.families.family import GATE_UP, Config, Family, TensorMapping, weight_and_bias
from megatron.checkpointing.families.llama import LLAMA_DEFAULTS, ROWS, llama_config, llama_keys, replaced_rows
from megatron.checkpointing.families.mamba import time_step_keys, with_defaults
from megatron.model.build_specs import attention_scale
from megatron.neox_arguments import ModelArgs


def _keys(config: Config) -> dict[str, Any]:
    factors = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
    return {
        **llama_keys(config, LLAMA_DEFAULTS),
        **{name: get(config, name, 1.0) for name in factors},
        "logit_scale": 1 / get(config, "logits_scaling", 1.0),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args),
        "mlp_bias": args.use_bias_in_mlp,
        "attention_multiplier": attention_scale(args) or args.head_dim**-0.5,
        "embedding_multiplier": args.embedding_multiplier,
        "residual_multiplier": args.residual_multiplier,
        "logits_scaling": number(float(f"{1 / args.logit_scale:.12g}")),  # 1 / (1 / 49) is not 49
    }


GRANITE = Family(
    "granite", "GraniteForCausalLM", ROWS, _keys, _config, title="Granite 3", has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)  # fmt: skip

_MOE = {
    **LLAMA_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
    "shared_intermediate_size": 0,
}  # fmt: skip
_BLOCK = "model.layers.{}."
_SPARSE = _BLOCK + "block_sparse_moe."
_INPUTS, _OUTPUT, _ROUTER = (f"{_SPARSE}{name}.weight" for name in ("input_linear", "output_linear", "router.layer"))
_MOE_ROWS = replaced_rows(
    TensorMapping("mlp.router.layer.weight", (_ROUTER,)),
    # One tensor holds the gates of all experts and then their up projections: [experts, 2 * width, hidden].
    TensorMapping("mlp.experts.mlp.w1", (_INPUTS,), stacked=True, part=(0, 2), consecutive=True),
    TensorMapping("mlp.experts.mlp.w3", (_INPUTS,), stacked=True, part=(1, 2), consecutive=True),
    TensorMapping("mlp.experts.mlp.w2", (_OUTPUT,), stacked=True, transposed=True),
)
_SHARED_ROWS = (
    TensorMapping("mlp.shared_expert.linear1.weight", (_BLOCK + "shared_mlp.input_linear.weight",), GATE_UP),
    TensorMapping("mlp.shared_expert.linear2.weight", (_BLOCK + "shared_mlp.output_linear.weight",)),
)
_IN_MEMORY = {
    f"{_SPARSE}experts.gate_up_proj": (_INPUTS,),
    f"{_SPARSE}experts.down_proj": (_OUTPUT,),
    f"{_SPARSE}router.weight": (_ROUTER,),
}


def _moe_keys(config: Config) -> dict[str, Any]:
    config = {**_MOE, **config}
    width = get(config, "shared_intermediate_size", 0)
    return {
        **_keys({**config, "mlp_bias": False}),
        **expert_keys({**config, "norm_topk_prob": True}, _MOE),
        **({"moe_shared_expert_intermediate_size": width} if width else {}),
    }


def _moe_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **drop_fields(_config(args), "mlp_bias"),
        **drop_fields(expert_config(args, "num_local_experts"), "norm_topk_prob"),
        "intermediate_size": args.expert_ffn_size,
    }


def _unshared_keys(config: Config) -> dict[str, Any]:
    return _moe_keys({**config, "shared_intermediate_size": 0})


GRANITE_MOE = Family(
    "granitemoe", "GraniteMoeForCausalLM", _MOE_ROWS, _unshared_keys, _moe_config, title="Granite 3 MoE",
    in_memory=_IN_MEMORY, has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)  # fmt: skip


def _shared_config(args: ModelArgs) -> dict[str, Any]:
    return {**_moe_config(args), "shared_intermediate_size": args.moe_shared_expert_intermediate_size or 0}


GRANITE_MOE_SHARED = Family(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", (*_MOE_ROWS, *_SHARED_ROWS), _moe_keys, _shared_config,
    title="Granite 3 MoE with a shared expert", in_memory=_IN_MEMORY, has_scorer=False,
    notes="factors for embeddings, attention logits, block outputs and logits; config.json sets: biases",
)  # fmt: skip

_LINEAR = "linear_attention"
_KINDS = {_LINEAR: "mamba2_mlp", "mamba": "mamba2_mlp", FULL: "global", "attention": "global"}
_MAMBA = _BLOCK + "mamba."
_HYBRID_ROWS = tuple(
    {
        row.neox_name: row
        for row in (
            *_MOE_ROWS,
            *_SHARED_ROWS,
            # Without experts the shared MLP is the only one.
            TensorMapping("mlp.linear1.weight", (_BLOCK + "shared_mlp.input_linear.weight",), GATE_UP),
            TensorMapping("mlp.linear2.weight", (_BLOCK + "shared_mlp.output_linear.weight",)),
            *(TensorMapping(f"mixer.{name}", (_MAMBA + name,)) for name in ("A_log", "D", "dt_bias", "norm.weight")),
            *weight_and_bias("mixer.in_proj", _MAMBA + "in_proj"),
            *weight_and_bias("mixer.conv1d", _MAMBA + "conv1d"),
            *weight_and_bias("mixer.out_proj", _MAMBA + "out_proj"),
        )
    }.values()
)
_HYBRID = {
    **_MOE, "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "time_step_limit": (0.0, math.inf),
}  # fmt: skip
# Our keys of Mamba 2's mixers -> fields of config.json.
_FIELDS = {
    "mamba_num_heads": "mamba_n_heads", "mamba_num_groups": "mamba_n_groups", "mamba_state_dim": "mamba_d_state",
    "mamba_conv_kernel": "mamba_d_conv", "mamba_chunk_size": "mamba_chunk_size",
    "mamba_use_bias_in_conv": "mamba_conv_bias", "mamba_use_bias_in_linears": "mamba_proj_bias",
}  # fmt: skip


def _hybrid_blocks(config: Config) -> list[str]:
    """Returns the NeoX name of each block's kind. Raises CheckpointError for an unsupported kind."""
    types = get(config, "layer_types", config.get("layers_block_type"))
    types = [_LINEAR] * config["num_hidden_layers"] if types is None else types
    unknown = sorted({*types} - {*_KINDS})
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types: {', '.join(unknown)} is not supported, only {_LINEAR}, {FULL}"
        )
    return [_KINDS[kind] for kind in types]


def _mamba_keys(config: Config) -> dict[str, Any]:
    heads, inner = config["mamba_n_heads"], config["mamba_expand"] * config["hidden_size"]
    width = inner // heads if config["mamba_d_head"] == "auto" else config["mamba_d_head"]
    if width * heads != inner:
        raise CheckpointError(
            f"config.json: mamba_expand: {config['mamba_expand']} times hidden_size must equal mamba_n_heads times "
            f"mamba_d_head, {width * heads}"
        )
    keys = {key: config[field] for key, field in _FIELDS.items()}
    return {**keys, "mamba_head_dim": width, **time_step_keys(config["time_step_limit"])}


def _hybrid_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _HYBRID)
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "position_embedding_type", "rope", "nope")
    blocks = _hybrid_blocks(config)
    experts = bool(config["num_local_experts"])
    width = config["shared_intermediate_size"]
    keys = _moe_keys(config) if experts else _keys({**config, "intermediate_size": width, "mlp_bias": False})
    if config.get("position_embedding_type") != "rope":
        keys = {name: value for name, value in keys.items() if not name.startswith(("rotary_", "rope_"))}
        keys["pos_emb"] = "none"
    return {**keys, "attention_config": blocks, **(_mamba_keys(config) if "mamba2_mlp" in blocks else {})}


def _hybrid_config(args: ModelArgs) -> dict[str, Any]:
    unsupported = sorted({*args.attention_config} - {*_KINDS.values(), "flash"})
    if unsupported:
        raise CheckpointError(f"Granite 4 has no blocks of kind {', '.join(unsupported)} (attention_config)")
    if args.moe_num_experts > 1:
        fields = _shared_config(args)
    else:
        fields = {**drop_fields(_config(args), "mlp_bias"), "shared_intermediate_size": args.ffn_size}
        fields |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    low, high = (*(args.mamba_time_step_limit or (0.0,)), math.inf)[:2]
    mamba = {field: getattr(args, key) for key, field in _FIELDS.items()} | {
        "mamba_n_heads": args.mamba2_heads,
        "mamba_d_head": args.mamba_head_dim,
        "mamba_expand": args.mamba2_heads * args.mamba_head_dim // args.hidden_size,
        "mamba_d_state": args.mamba_state_dim or 128,
        **({} if (low, high) == (0.0, math.inf) else {"time_step_limit": [low, high]}),
    }
    return {
        **fields,
        "position_embedding_type": "rope" if args.pos_emb == "rotary" else "nope",
        # Older versions of transformers read only these names.
        "layer_types": ["mamba" if kind == "mamba2_mlp" else "attention" for kind in args.attention_config],
        **(mamba if "mamba2_mlp" in args.attention_config else {}),
    }


GRANITE_HYBRID = Family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", _HYBRID_ROWS, _hybrid_keys, _hybrid_config, title="Granite 4",
    in_memory=_IN_MEMORY, has_scorer=False,
    notes="factors as in Granite 3; config.json sets: kinds of blocks, experts or an MLP, positions, biases",
)  # fmt: skip
