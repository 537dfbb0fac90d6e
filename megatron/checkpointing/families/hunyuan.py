"""Describes HunYuan, dense and with experts: queries and keys have norms after their rotation."""

from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import drop_fields, get, refuse_unless, rope_keys, rope_of
from megatron.checkpointing.families.experts import DEEPSEEK_ROWS, EXPERTS_IN_MEMORY, expert_config, expert_keys
from megatron.checkpointing.families.family import UP_GATE, Config, Family, TensorMapping
from megatron.checkpointing.families.llama import (
    LLAMA_DEFAULTS,
    PER_HEAD,
    common_keys,
    llama_config,
    replaced_rows,
)
from megatron.neox_arguments import ModelArgs

_DEFAULTS = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5}
_BLOCK = "model.layers.{}."
_NORM_ROWS = (
    TensorMapping("attention.q_norm.scale", (_BLOCK + "self_attn.query_layernorm.weight",)),
    TensorMapping("attention.k_norm.scale", (_BLOCK + "self_attn.key_layernorm.weight",)),
)


def _keys(config: Config) -> dict[str, Any]:
    config = {**_DEFAULTS, **config}
    rope, alpha = rope_of(config, theta=10000.0), None
    if rope["rope_type"] == "dynamic":
        alpha = rope.get("alpha")
    if alpha:  # transformers then changes only the base, and needs head_dim
        if config.get("head_dim") is None:
            raise CheckpointError("config.json: head_dim is missing; rope_scaling.alpha needs it")
        dim = config["head_dim"]
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"] * alpha ** (dim / (dim - 2))}
    return {
        **common_keys({**config, "mlp_bias": False}, _DEFAULTS),
        **rope_keys(config, drop_fields(rope, "alpha")),
        **PER_HEAD,
        "qk_norm_after_rotary": True,
    }


# Lists with a number for each layer, or false, in models with and without experts.
_UNREAD = ("moe_intermediate_size", "n_group", "routed_scaling_factor", "topk_group")

HUNYUAN = Family(
    "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", replaced_rows(*_NORM_ROWS), _keys, llama_config,
    unread=_UNREAD, title="HunYuan (dense)", notes="config.json sets: a rotary base scaled by alpha, biases",
)  # fmt: skip

_SHARED = _BLOCK + "mlp.shared_mlp."
_MOE_ROWS = replaced_rows(
    *_NORM_ROWS,
    *DEEPSEEK_ROWS,
    TensorMapping("mlp.router.layer.weight", (_BLOCK + "mlp.gate.wg.weight",)),
    TensorMapping(
        "mlp.shared_expert.linear1.weight", (f"{_SHARED}up_proj.weight", f"{_SHARED}gate_proj.weight"), UP_GATE
    ),
    TensorMapping("mlp.shared_expert.linear2.weight", (f"{_SHARED}down_proj.weight",)),
)


def _top_k(config: Config) -> int:
    """Returns the number of experts per token. Raises CheckpointError if layers differ."""
    top_k = get(config, "moe_topk", 1)
    values = set(top_k) if isinstance(top_k, list) else {top_k}
    if len(values) != 1:
        raise CheckpointError(f"config.json: moe_topk: {top_k} is not supported; layers must have one value")
    return values.pop()


def _moe_keys(config: Config) -> dict[str, Any]:
    experts = {"num_experts": get(config, "num_experts", 1), "num_experts_per_tok": _top_k(config)}
    refuse_unless(config, "output_router_logits", False)  # transformers has no balancing loss for this family
    width = get(config, "intermediate_size", _DEFAULTS["intermediate_size"])
    return {
        **_keys(config),
        **expert_keys({**config, **experts, "norm_topk_prob": True}, {"router_aux_loss_coef": 0.0}),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": width,
    }


def _moe_config(args: ModelArgs) -> dict[str, Any]:
    return {
        **llama_config(args),
        **drop_fields(expert_config(args), "norm_topk_prob", "num_experts_per_tok"),
        "moe_topk": args.moe_top_k,
        "intermediate_size": args.expert_ffn_size,
    }


HUNYUAN_MOE = Family(
    "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _MOE_ROWS, _moe_keys, _moe_config, title="HunYuan MoE",
    unread=_UNREAD, in_memory=EXPERTS_IN_MEMORY, typical={"num_experts": 64, "moe_topk": 8},
    notes="config.json sets: a rotary base scaled by alpha; an fp32 router beside 16-bit weights needs --precision",
)  # fmt: skip
