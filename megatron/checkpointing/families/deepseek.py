"""Describes DeepSeek V2 and V3, dots.llm1 and Youtu-LLM.

They have latent attention, and experts that are chosen from groups, beside shared experts, or only one of
both.
"""

from collections.abc import Sequence
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import (
    SLIDING,
    get,
    layer_kinds,
    layer_types,
    refuse_unless,
    rope_config,
    rope_keys,
    rope_of,
    window_keys,
    window_of,
)
from megatron.checkpointing.families.experts import DEEPSEEK_ROWS, EXPERTS_IN_MEMORY
from megatron.checkpointing.families.family import Config, Family, TensorMapping, weight_and_bias
from megatron.checkpointing.families.llama import (
    PER_HEAD,
    common_config,
    common_keys,
    llama_config,
    llama_keys,
    replaced_rows,
)
from megatron.neox_arguments import ModelArgs

_ATTENTION = "model.layers.{}.self_attn."
LATENT_ROWS = (
    TensorMapping("attention.query.weight", (_ATTENTION + "q_proj.weight",)),
    *weight_and_bias("attention.query_down", _ATTENTION + "q_a_proj"),
    TensorMapping("attention.query_norm.scale", (_ATTENTION + "q_a_layernorm.weight",)),
    TensorMapping("attention.query_up.weight", (_ATTENTION + "q_b_proj.weight",)),
    *weight_and_bias("attention.latent_down", _ATTENTION + "kv_a_proj_with_mqa"),
    TensorMapping("attention.latent_norm.scale", (_ATTENTION + "kv_a_layernorm.weight",)),
    TensorMapping("attention.latent_up.weight", (_ATTENTION + "kv_b_proj.weight",)),
)
_WIDTHS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DENSE, SPARSE = "dense", "sparse"
_LATENT_EPSILON = 1e-6  # of transformers' norms of latents, whatever rms_norm_eps is
_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432,
    "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}  # fmt: skip
_V2 = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "moe_intermediate_size": 1407, "n_shared_experts": 2, "n_routed_experts": 64,
    "routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "num_experts_per_tok": 6,  # DeepSeek V2's; transformers has no default
}  # fmt: skip


def with_defaults(config: Config, defaults: Config, *nullable: str) -> dict[str, Any]:
    """Returns `config` with the defaults of its family. A null means the default, except in q_lora_rank and
    `nullable`."""
    written = {name: value for name, value in config.items() if value is not None or name in ("q_lora_rank", *nullable)}
    return {**defaults, **written}


def latent_keys(config: Config, *, interleaved: bool | None) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a model with latent attention: sizes, positions, widths.

    config: config.json with the defaults of its family.
    interleaved: whether rotary positions rotate neighbouring dimensions; None: there are no positions.
    Raises CheckpointError if heads share keys and values."""
    heads = config["num_attention_heads"]
    refuse_unless(config, "num_key_value_heads", heads)
    positions: dict[str, Any] = {"pos_emb": "none"}
    if interleaved is not None:
        positions = {**rope_keys(config, rope_of(config, theta=10000.0)), "rotary_interleaved": interleaved}
    return {
        **common_keys({**config, "num_key_value_heads": heads, "head_dim": None}, config),
        **positions,
        **{name: config[name] for name in _WIDTHS},
        "latent_norm_epsilon": _LATENT_EPSILON,
    }


def rotates_neighbours(config: Config) -> bool:
    """Whether rotary positions rotate neighbouring dimensions: by default, but not if the field is null."""
    return get(config, "rope_interleave", "rope_interleave" not in config)


def latent_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for a model with latent attention, the inverse of `latent_keys`."""
    config = {**common_config(args, head_dim=False), **(rope_config(args) if args.pos_emb == "rotary" else {})}
    config.pop("head_dim", None)
    return {**config, **{name: getattr(args, name) for name in _WIDTHS}}


def first_dense(config: Config) -> list[str]:
    """Returns the kind of each block's feed-forward, dense or sparse, by `first_k_dense_replace`."""
    dense = config["first_k_dense_replace"]
    return [DENSE if i < dense else SPARSE for i in range(config["num_hidden_layers"])]


def first_dense_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's field for the number of dense blocks before the first with experts."""
    with_experts = [args.has_experts(block) for block in range(args.num_layers)]
    return {"first_k_dense_replace": with_experts.index(True) if True in with_experts else args.num_layers}


def grouped_expert_keys(config: Config, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the NeoX configuration keys for DeepSeek's experts: groups, dense blocks, shared experts.

    config: config.json with the defaults of its family. kinds: of each block's feed-forward, dense or sparse.
    Raises CheckpointError for a model without experts or without shared experts."""
    experts, shared, width = (
        config[name] for name in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size")
    )
    if not experts or experts < 2:
        raise CheckpointError(f"config.json: n_routed_experts: {experts}; a model with experts has 2 or more")
    if not shared:
        raise CheckpointError(f"config.json: n_shared_experts: {shared} is not supported, only 1 or more")
    with_experts = [int(kind == SPARSE) for kind in kinds]
    groups, top_groups = config["n_group"], config["topk_group"]
    return {
        "moe_num_experts": experts,
        "moe_top_k": config["num_experts_per_tok"],
        "moe_router_type": "topk",
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": shared * width,
        **({"moe_layer_freq": with_experts} if 0 in with_experts else {}),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": top_groups} if top_groups < groups else {}),
    }


def grouped_expert_config(args: ModelArgs) -> dict[str, Any]:
    """Returns config.json's fields for DeepSeek's experts, the inverse of `grouped_expert_keys`."""
    shared, width = args.moe_shared_expert_intermediate_size or 0, args.expert_ffn_size
    return {
        "n_routed_experts": args.moe_num_experts,
        "n_shared_experts": max(1, shared // width),  # another width is refused by the comparison
        "num_experts_per_tok": args.moe_top_k,
        "moe_intermediate_size": width,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor,
        "n_group": args.moe_router_num_groups or 1,
        "topk_group": args.moe_router_group_topk or 1,
    }


def sigmoid_keys(config: Config) -> dict[str, Any]:
    """Returns the NeoX configuration keys for the router of DeepSeek V3: sigmoid scores, biases of the
    choice."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 0.0,  # the biases exist and stay constant
        "norm_topk_prob": config["norm_topk_prob"],
    }


def _refuse_others(config: Config, **fields: str) -> None:
    """Refuse fields of DeepSeek's own code that transformers does not read, with values that it does not
    compute."""
    for name, value in fields.items():
        refuse_unless(config, name, value)
    refuse_unless(config, "moe_layer_freq", 1)


def _v3_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _V3)
    _refuse_others(config, scoring_func="sigmoid", topk_method="noaux_tc")
    refuse_unless(config, "head_dim", config["qk_rope_head_dim"])  # transformers' number of rotary dimensions
    return {
        **latent_keys({**config, "mlp_bias": False}, interleaved=rotates_neighbours(config)),
        **grouped_expert_keys(config, first_dense(config)),
        **sigmoid_keys(config),
    }


def _v3_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **latent_config(args),
        **grouped_expert_config(args),
        **first_dense_config(args),
        "norm_topk_prob": args.norm_topk_prob,
        "rope_interleave": args.rotary_interleaved,
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


ROWS = replaced_rows(*LATENT_ROWS, *DEEPSEEK_ROWS)
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", ROWS, _v3_keys, _v3_config, title="DeepSeek V3, R1, Kimi K2",
    in_memory=EXPERTS_IN_MEMORY, predicts_more=True,
    notes="config.json sets: dense blocks at the start, expert groups, YaRN, biases; layers for multi-token "
    "prediction are read and written with mtp_num_layers",
)  # fmt: skip


def _v2_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _V2)
    _refuse_others(config, scoring_func="softmax")
    refuse_unless(config, "topk_method", "greedy", "group_limited_greedy")
    refuse_unless(config, "norm_topk_prob", False)  # transformers ignores this field
    refuse_unless(config, "mlp_bias", False)
    grouped = config.get("topk_method") == "group_limited_greedy"
    ungrouped = {} if grouped else {"n_group": 1, "topk_group": 1}
    experts = grouped_expert_keys({**config, **ungrouped}, first_dense(config))
    groups = {"moe_router_group_score": "best"} if "moe_router_num_groups" in experts else {}
    return {**latent_keys({**config, "mlp_bias": False}, interleaved=True), **experts, **groups}


def _v2_config(args: ModelArgs) -> dict[str, Any]:
    experts = grouped_expert_config(args)
    grouped = experts["topk_group"] < experts["n_group"]
    return {
        **latent_config(args),
        **experts,
        **first_dense_config(args),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "norm_topk_prob": False,
    }


DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", ROWS, _v2_keys, _v2_config, title="DeepSeek V2",
    in_memory=EXPERTS_IN_MEMORY,
    notes="config.json sets: dense blocks at the start, expert groups, YaRN, biases",
)  # fmt: skip

_DOTS1 = {
    "hidden_size": 4608, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 10944, "max_position_embeddings": 2048, "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
    "sliding_window": 4096, "max_window_layers": 62,
    # dots.llm1's; transformers has no defaults
    "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
}  # fmt: skip


def _dots1_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _DOTS1, "sliding_window")
    full = config["max_window_layers"]
    return {
        **llama_keys({**config, "mlp_bias": False}, config),
        **PER_HEAD,
        **window_keys(config["sliding_window"], layer_kinds(config, lambda i: i >= full)),
        **grouped_expert_keys(config, first_dense(config)),
        **sigmoid_keys(config),
    }


def _dots1_config(args: ModelArgs) -> dict[str, Any]:
    types = layer_types(args)
    return {
        **llama_config(args),
        **grouped_expert_config(args),
        **first_dense_config(args),
        "norm_topk_prob": args.norm_topk_prob,
        "sliding_window": window_of(args),
        "max_window_layers": types.index(SLIDING) if SLIDING in types else args.num_layers,
        "layer_types": types,
    }


DOTS1 = Family(
    "dots1", "Dots1ForCausalLM", replaced_rows(*DEEPSEEK_ROWS), _dots1_keys, _dots1_config, title="dots.llm1",
    in_memory=EXPERTS_IN_MEMORY, has_scorer=False, notes="config.json sets: dense blocks at the start, windows",
)  # fmt: skip

_YOUTU = {
    **{name: _V3[name] for name in _WIDTHS}, "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 16,
    "intermediate_size": 6144, "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip


def _youtu_keys(config: Config) -> dict[str, Any]:
    config = with_defaults(config, _YOUTU)
    return latent_keys({**config, "mlp_bias": False}, interleaved=rotates_neighbours(config))


def _youtu_config(args: ModelArgs) -> dict[str, Any]:
    return {**latent_config(args), "rope_interleave": args.rotary_interleaved}


YOUTU = Family(
    "youtu", "YoutuForCausalLM", replaced_rows(*LATENT_ROWS), _youtu_keys, _youtu_config, title="Youtu-LLM",
    has_scorer=False, notes="config.json sets: YaRN, biases",
)  # fmt: skip
