"""Describes the family of Nemotron-H and Nemotron 3.

Each block has one norm, followed by either Mamba 2, attention, an MLP or experts.
"""

import math
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    get,
    plain_activation,
    plain_activation_keys,
    refuse_unless,
    size_config,
)
from megatron.checkpointing.families.family import QKV, Config, Family, TensorMapping, weight_and_bias
from megatron.checkpointing.families.mamba import ROWS_2, time_step_keys, with_defaults
from megatron.neox_arguments import ModelArgs

_MIXER = "backbone.layers.{}.mixer."
_EXPERT = _MIXER + "experts.{expert}."
_SHARED = "mlp.shared_expert."
_ROWS = (
    *ROWS_2,
    TensorMapping("attention.query_key_value.weight", tuple(f"{_MIXER}{name}_proj.weight" for name in "qkv"), QKV),
    TensorMapping("attention.dense.weight", (_MIXER + "o_proj.weight",)),
    *weight_and_bias("mlp.linear1", _MIXER + "up_proj"),
    *weight_and_bias("mlp.linear2", _MIXER + "down_proj"),
    TensorMapping("mlp.router.layer.weight", (_MIXER + "gate.weight",)),
    TensorMapping("mlp.router.expert_bias", (_MIXER + "gate.e_score_correction_bias",)),
    TensorMapping("mlp.experts.mlp.w1", (_EXPERT + "up_proj.weight",)),
    TensorMapping("mlp.experts.mlp.w2", (_EXPERT + "down_proj.weight",), transposed=True),
    TensorMapping("mlp.latent_down.weight", (_MIXER + "fc1_latent_proj.weight",)),
    TensorMapping("mlp.latent_up.weight", (_MIXER + "fc2_latent_proj.weight",)),
    TensorMapping(_SHARED + "linear1.weight", (_MIXER + "shared_experts.up_proj.weight",)),
    TensorMapping(_SHARED + "linear2.weight", (_MIXER + "shared_experts.down_proj.weight",)),
)


def _memory_name(row: TensorMapping, name: str) -> str:
    """Converts a name in files to the name in transformers 5's memory, where one tensor holds all experts."""
    name = name.replace("backbone.", "model.", 1)
    return name.replace(".{expert}", "").removesuffix(".weight") if row.is_per_expert else name


_NAMES = {_memory_name(row, name): name for row in _ROWS for name in row.hf_names}
# Our kind of a block -> (letter in hybrid_override_pattern, names in layers_block_type).
_KINDS = {
    "mamba2": ("M", "linear_attention", "mamba"), "attention": ("*", "full_attention", "attention"),
    "mlp": ("-", "mlp"), "moe": ("E", "moe"),
}  # fmt: skip
# The smallest normal fp32 number. As time_step_min it limits nothing; transformers does not accept 0.
_NO_LIMIT = 2.0**-126
# Older names of fields -> current names. transformers reads both, and prefers the older.
_OLDER = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size",
}  # fmt: skip
# Our keys of Mamba 2's blocks -> fields of config.json.
_STATE_FIELDS = {
    "mamba_state_dim": "ssm_state_size", "mamba_num_heads": "mamba_num_heads", "mamba_head_dim": "mamba_head_dim",
    "mamba_num_groups": "n_groups", "mamba_conv_kernel": "conv_kernel", "mamba_chunk_size": "chunk_size",
    "mamba_use_bias_in_conv": "use_conv_bias", "mamba_use_bias_in_linears": "use_bias",
}  # fmt: skip
_DEFAULTS = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "intermediate_size": 21504, "mlp_bias": False, "ssm_state_size": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
    "use_conv_bias": True, "chunk_size": 128, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def _blocks(config: Config) -> list[str]:
    """Returns the NeoX name of each block's kind: mamba2, attention, mlp or moe.

    Raises CheckpointError for an unsupported kind."""
    field, letters = "layers_block_type", get(config, "layers_block_type", config.get("layer_types"))
    if letters is None and "hybrid_override_pattern" in config:
        field, letters = "hybrid_override_pattern", config["hybrid_override_pattern"]
    letters = ("M", "E", "*", "-") if letters is None else letters
    kinds = {name: kind for kind, names in _KINDS.items() for name in names}
    unknown = sorted(set(letters) - kinds.keys())
    if unknown:
        raise CheckpointError(f"config.json: {field}: {', '.join(unknown)} is not a supported kind of block")
    return [kinds[name] for name in letters]


def _keys(config: Config) -> dict[str, Any]:
    fields = {**config, **{name: config[old] for old, name in _OLDER.items() if config.get(old) is not None}}
    if "head_dim" not in fields and fields.get("attention_head_dim"):
        fields["head_dim"] = fields["attention_head_dim"]
    if "n_routed_experts" not in fields and fields.get("num_local_experts"):
        fields["n_routed_experts"] = fields["num_local_experts"]
    heads = get(fields, "num_attention_heads", _DEFAULTS["num_attention_heads"])
    kv_heads = heads if "num_key_value_heads" in fields else _DEFAULTS["num_key_value_heads"]
    kv_heads = get(fields, "num_key_value_heads", kv_heads)
    config = with_defaults(fields, _DEFAULTS)
    for name in ("attention_bias", "mamba_proj_bias", "tie_word_embeddings"):  # transformers ignores these fields
        refuse_unless(config, name, False)
    refuse_unless(config, "mamba_hidden_act", "silu", "swish")
    refuse_unless(config, "sliding_window", None)
    blocks = _blocks(config)
    return {
        "num_layers": len(blocks),
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": config["head_dim"],
        "max_position_embeddings": config["max_position_embeddings"],
        "seq_length": config["max_position_embeddings"],
        "pos_emb": "none",
        "no_weight_tying": True,
        "norm": "rmsnorm",
        "rms_norm_epsilon": config["layer_norm_epsilon"],
        "attention_config": blocks,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": config["mlp_bias"],
        "intermediate_size": config["intermediate_size"],
        "compat_ffn_width": "none",
        **plain_activation_keys(config, "mlp_hidden_act", "relu2"),
        **(_mamba_keys(config) if "mamba2" in blocks else {}),
        **(_expert_keys(config) if "moe" in blocks else {}),
    }


def _mamba_keys(config: Config) -> dict[str, Any]:
    low = config["time_step_min"]  # not time_step_limit, which transformers ignores
    return {
        **time_step_keys((0.0 if low <= _NO_LIMIT else low, math.inf)),
        **{key: config[field] for key, field in _STATE_FIELDS.items()},
    }


def _expert_keys(config: Config) -> dict[str, Any]:
    experts, groups, top_groups = (config[name] for name in ("n_routed_experts", "n_group", "topk_group"))
    if experts < 2:
        raise CheckpointError(f"config.json: n_routed_experts: {experts}: a mixture of experts needs at least two")
    if config["mlp_bias"]:
        raise CheckpointError("config.json: mlp_bias: true is not supported in a model with moe blocks, only false")
    refuse_unless(config, "n_shared_experts", 1)
    return {
        "moe_num_experts": experts,
        "moe_top_k": config["num_experts_per_tok"],
        "moe_router_type": "topk",
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 0.0,  # the biases exist and stay constant
        "norm_topk_prob": config["norm_topk_prob"],
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_intermediate_size": config["moe_intermediate_size"],
        "moe_latent_size": config.get("moe_latent_size"),
        "moe_shared_expert_intermediate_size": config["moe_shared_expert_intermediate_size"],
        **({"moe_router_num_groups": groups, "moe_router_group_topk": top_groups} if top_groups < groups else {}),
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    unsupported = sorted(set(args.attention_config) - _KINDS.keys())
    if unsupported:
        raise CheckpointError(
            f"the family nemotron_h has no blocks of kind {', '.join(unsupported)} (attention_config)"
        )
    limit, blocks = args.mamba_time_step_limit or (0.0,), set(args.attention_config)
    config = {
        **size_config(args),
        # All versions of transformers read this field; the names in layers_block_type have changed.
        "hybrid_override_pattern": "".join(_KINDS[kind][0] for kind in args.attention_config),
        "layer_norm_epsilon": args.rms_norm_epsilon,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "attention_bias": False,
        "mlp_hidden_act": plain_activation(args, "relu2"),
        "mlp_bias": args.use_bias_in_mlp,
    }
    if "mamba2" in blocks:
        config |= {
            **{field: getattr(args, key) for key, field in _STATE_FIELDS.items()},
            "ssm_state_size": args.mamba_state_dim or 128,
            "mamba_num_heads": args.mamba2_heads,
            "time_step_min": limit[0] or _NO_LIMIT,
        }
    if "moe" in blocks:
        config |= {
            "n_routed_experts": args.moe_num_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": args.moe_top_k,
            "moe_intermediate_size": args.expert_ffn_size,
            "moe_latent_size": args.moe_latent_size,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "norm_topk_prob": args.norm_topk_prob,
            "routed_scaling_factor": args.moe_router_topk_scaling_factor,
            "n_group": args.moe_router_num_groups or 1,
            "topk_group": args.moe_router_group_topk or 1,
        }
    return config


NEMOTRON_H = Family(
    "nemotron_h", "NemotronHForCausalLM", _ROWS, _keys, _config, title="Nemotron-H, Nemotron 3",
    carried=r"mtp\..*", has_scorer=False, base_prefix="backbone.",
    in_memory={memory_name: (name,) for memory_name, name in _NAMES.items() if memory_name != name},
    notes="config.json sets: block kinds, expert groups, scaling factor and latent size; time steps are at least "
    "time_step_min, as in transformers; multi-token prediction layers (mtp) are kept, not trained",
)  # fmt: skip
