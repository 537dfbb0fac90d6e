"""Makes the specs of layers from the configuration."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron.model.specs import (
    AttentionSpec,
    DenseSpec,
    EmbeddingSpec,
    HeadNormSpec,
    LatentAttentionSpec,
    MoESpec,
    NormSpec,
    RelativeSpec,
    Residual,
    RotarySpec,
    RouterSpec,
)
from megatron.mpu import LoraSpec, LowRank
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.model_args import ATTENTION_BLOCKS, FULL_BLOCKS
from megatron.neox_arguments.values.lora_settings import block_adapters, copied_modules, lora_scale

# The epsilons of Transformer-Engine's LayerNormMLP in GPT-NeoX (transformer_engine.py), which ignores the
# keys.
_TE_EPSILON = {"layernorm": 1e-5, "rmsnorm": 1e-8}
# value of `activation` -> name of its function; for gated activations, of the function applied to the gate
_FUNCTIONS = {
    "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "swish": "silu", "swiglu": "silu",
    "bilinear": "identity", "glu": "sigmoid",
}  # fmt: skip


def norm_kind(args: ModelArgs) -> str:
    """Returns the value of the key `norm` without the prefix `te_`, which only changes names of parameters on
    disk."""
    return args.norm.removeprefix("te_")


def has_one_norm(args: ModelArgs) -> bool:
    """Whether attention and MLP read the output of the same norm (gpt_j_tied).

    Never with Transformer-Engine's MLP (te_layernorm_mlp), which has a norm of its own, also in GPT-NeoX.
    """
    return args.gpt_j_residual and args.gpt_j_tied and not args.te_layernorm_mlp


def _has_norm_bias(args: ModelArgs) -> bool:
    return norm_kind(args) == "layernorm" and (args.use_bias_in_norms or args.compat_norm_bias)


def norm_spec(args: ModelArgs, *, in_te_mlp: bool = False) -> NormSpec:
    """Returns the norm that the key `norm` selects.

    in_te_mlp: for Transformer-Engine's MLP, whose norm has a fixed epsilon.
    """
    kind = norm_kind(args)
    epsilons = {"rmsnorm": args.rms_norm_epsilon, "scalenorm": args.scalenorm_epsilon}
    eps = _TE_EPSILON[kind] if in_te_mlp else epsilons.get(kind, args.layernorm_epsilon)
    return NormSpec(kind, args.hidden_size, eps, _has_norm_bias(args), args.zero_centered_gamma)


def rotary_spec(args: ModelArgs, *, local: bool = False, head_dim: int | None = None) -> RotarySpec:
    """Returns the rotary settings of the model's layers.

    head_dim: width of the layer's heads; None: that of the key `head_dim`.
    local: for layers with a window. If `rope_local_base_freq` is set, these layers have it as base, without
        scaling. Otherwise they have the settings of all layers.
    """
    # NeoX rounds the rotated width down to an even number of dimensions.
    rotated = args.rotary_width if head_dim in (None, args.head_dim) else int(head_dim * args.rotary_pct)
    width, positions = rotated // 2 * 2, args.max_position_embeddings
    if local and args.rope_local_base_freq is not None:
        return RotarySpec(width, args.rope_local_base_freq, positions, interleaved=args.rotary_interleaved)
    return RotarySpec(width, args.rotary_emb_base, positions, args.rope_scaling, args.rotary_interleaved)


def head_norm_spec(args: ModelArgs, head_dim: int) -> HeadNormSpec | None:
    """Returns the norms of queries and keys of a layer; None without use_qk_layernorm."""
    if not args.use_qk_layernorm:
        return None
    form, eps = norm_kind(args), args.rms_norm_epsilon
    if args.use_separate_qk_norms:
        form = "per_head" if args.qk_norm_per_head else "wide"
    elif form == "layernorm":
        eps = args.layernorm_epsilon
    return HeadNormSpec(form, head_dim, eps, _has_norm_bias(args), args.zero_centered_gamma, args.qk_norm_after_rotary)


def _block_value(value: int | tuple[int, ...], block: int) -> int:
    return value[block] if isinstance(value, tuple) else value


def attention_spec(args: ModelArgs, block: int) -> AttentionSpec | None:
    """Returns the attention of block number `block`, counted from 0; None if the block has another mixer."""
    if args.attention_config[block] not in ATTENTION_BLOCKS:
        return None
    slides = args.layer_types is None or args.layer_types[block] == "sliding_attention"
    width = args.sliding_window_width if slides else None
    # A window as wide as the longest sequence hides nothing, so it counts as no window.
    window = width if width is not None and width < args.max_position_embeddings - 1 else None
    head_dim, is_global = args.head_dim_of(block), not args.has_window(block)
    turns = args.pos_emb == "rotary" and (args.no_rope_layers is None or args.no_rope_layers[block] == 1)
    named_flash = args.attention_config[block] == "flash" and "global" in args.attention_config
    relative = RelativeSpec(args.rpe_num_buckets, args.rpe_max_distance, args.num_attention_heads, args.head_dim)
    return AttentionSpec(
        hidden=args.hidden_size, heads=args.num_attention_heads, kv_heads=_block_value(args.kv_heads, block),
        head_dim=head_dim, window=window,
        rotary=rotary_spec(args, local=slides, head_dim=head_dim) if turns else None,
        alibi=args.pos_emb == "alibi", relative=relative if args.pos_emb == "rpe" else None,
        norms=head_norm_spec(args, head_dim), scale=attention_scale(args), softcap=args.attn_logit_softcapping,
        clip=args.clip_qkv, sinks=args.attention_sinks, bias=args.use_bias_in_attn_linear or args.add_qkv_bias,
        output_bias=args.use_bias_in_attn_linear, dropout=args.attention_dropout,
        backend="flash" if named_flash else args.attention_backend, parallel_residual=args.gpt_j_residual,
        lora=lora_spec(args, block), output_gate=args.attention_output_gate,
        keys_are_values=args.attention_k_eq_v and is_global,
        value_norm_eps=norm_spec(args).eps if args.use_v_norm else None,
    )  # fmt: skip


def latent_attention_spec(args: ModelArgs, block: int) -> LatentAttentionSpec | None:
    """Returns the latent attention of block number `block`, counted from 0; None if the block has another
    mixer."""
    attention = attention_spec(args, block)
    if attention is None or args.kv_lora_rank is None:
        return None
    assert args.qk_nope_head_dim and args.qk_rope_head_dim and args.v_head_dim  # `validate_model` needs them
    shared = {field.name: getattr(attention, field.name) for field in fields(attention)}
    scale = (attention.scale or args.head_dim**-0.5) * logit_growth(args.rope_scaling) ** 2
    return LatentAttentionSpec(
        **{**shared, "scale": scale}, latent=args.kv_lora_rank, query_latent=args.q_lora_rank,
        nope_dim=args.qk_nope_head_dim, rope_dim=args.qk_rope_head_dim, v_head_dim=args.v_head_dim,
        latent_eps=args.latent_norm_epsilon,
    )  # fmt: skip


def logit_growth(scaling: Mapping[str, Any] | None) -> float:
    """Returns the root of the factor by which YaRN grows the logits of latent attention: 0.1 mscale_all_dim
    ln(factor) + 1.

    It is 1 without `mscale_all_dim`. scaling: the value of the key `rope_scaling`. DeepSeek's models have it
    beside YaRN's factor of the rotary tables.
    """
    if scaling is None or not scaling["mscale_all_dim"]:
        return 1.0
    return 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0


def attention_scale(args: ModelArgs) -> float | None:
    """Returns the factor of attention logits; None: 1 / sqrt(head_dim)."""
    if args.query_pre_attn_scalar is not None:
        return args.query_pre_attn_scalar**-0.5
    return args.attention_multiplier


def lora_spec(args: ModelArgs, block: int) -> LoraSpec | None:
    """Returns the low-rank adapters of block number `block`, counted from 0; None without `lora`."""
    if args.lora is None:
        return None
    init, sizes = args.lora["init"], block_adapters(args, block)
    return LoraSpec(
        dropout=args.lora_dropout, dora=args.lora["dora"],
        init_a="gaussian_over_rank" if init == "gaussian" else "kaiming_uniform",
        init_b="kaiming_uniform" if init is False else "zeros",
        targets={name: LowRank(r, lora_scale(args, r, alpha)) for name, (r, alpha) in sizes.items()},
    )  # fmt: skip


def dense_spec(args: ModelArgs, block: int) -> DenseSpec | None:
    """Returns the dense feed-forward of block number `block`, counted from 0; None if the block has none."""
    return _dense(args, block) if args.has_dense(block) else None


def _dense(args: ModelArgs, block: int) -> DenseSpec:
    return DenseSpec(
        hidden=args.hidden_size, width=_block_value(args.ffn_size, block), activation=activation_name(args),
        gated=args.is_gated, bias=args.use_bias_in_mlp, parallel_residual=args.gpt_j_residual,
        lora=lora_spec(args, block),
    )  # fmt: skip


def moe_spec(args: ModelArgs, block: int) -> MoESpec | None:
    """Returns the mixture of experts of block number `block`, counted from 0; None if the block has none."""
    if not args.has_experts(block):
        return None
    dense, shared_width = _dense(args, block), args.moe_shared_expert_intermediate_size
    groups = args.moe_router_num_groups or 1
    router = RouterSpec(
        hidden=args.hidden_size, experts=args.moe_num_experts, top_k=args.moe_top_k,
        sinkhorn=args.moe_router_type == "sinkhorn", scores=args.router_scores, normalized=args.norm_topk_prob,
        factor=args.moe_router_topk_scaling_factor, groups=groups, top_groups=args.moe_router_group_topk or groups,
        group_score=args.moe_router_group_score,
        bias=args.moe_router_bias, bias_update_rate=args.moe_router_bias_update_rate, jitter=args.moe_jitter_eps or 0.0,
    )  # fmt: skip
    latent, sharded = args.moe_latent_size, args.moe_expert_tensor_parallel == "cut"
    hidden, width = latent or args.hidden_size, args.expert_ffn_size
    expert = replace(dense, hidden=hidden, width=width, bias=args.moe_expert_bias, lora=None)
    shared = replace(dense, width=shared_width, bias=False) if shared_width is not None else None
    factor, gate = args.moe_expert_capacity_factor, args.moe_shared_expert_gate
    return MoESpec(router, expert, factor, sharded, shared, gate, latent is not None)


def activation_name(args: ModelArgs) -> str:
    """Returns the name of the function that the key `activation` selects; for gated activations, that of the
    gate.

    gelu is exact (erf), or the tanh approximation with `bias_gelu_fusion`, as in NeoX. Transformer-Engine's
    gelu and geglu are the tanh approximation: `x * (0.5F + 0.5F * tanhf(x * (0.79788456F + 0.03567741F * x *
    x)))` in common/util/math.h. Its tests compare LayerNormMLP with `nn.GELU(approximate="tanh")`.
    """
    name = _FUNCTIONS.get(args.activation, args.activation)
    tanh = args.te_layernorm_mlp or (args.activation == "gelu" and args.bias_gelu_fusion)
    return "gelu_tanh" if name == "gelu" and tanh else name


def block_norms(args: ModelArgs, block: int) -> dict[str, NormSpec]:
    """Returns the norms of block number `block`, by their names in the block; blocks with a single sublayer
    have `norm`."""
    if args.attention_config[block] not in FULL_BLOCKS:
        return {"norm": norm_spec(args)}
    norm, mlp_norm = norm_spec(args), norm_spec(args, in_te_mlp=args.te_layernorm_mlp)
    input_norm = {"input_layernorm": norm}
    pre_norms = input_norm if has_one_norm(args) else {**input_norm, "post_attention_layernorm": mlp_norm}
    post_norms = {"post_attention_layernorm": norm, "post_feedforward_layernorm": norm}
    placed = {"olmo3": post_norms, "sandwich": {**input_norm, **post_norms, "pre_feedforward_layernorm": norm}}
    return placed.get(args.norm_placement, pre_norms)


def residual_form(args: ModelArgs, block: int) -> Residual:
    """Returns the residual form of block number `block`: single, parallel, sequential, olmo3 or sandwich."""
    if args.attention_config[block] not in FULL_BLOCKS:
        return "single"
    if args.gpt_j_residual:
        return "parallel"
    return args.norm_placement if args.norm_placement in ("olmo3", "sandwich") else "sequential"


def embedding_spec(args: ModelArgs) -> EmbeddingSpec:
    """Returns the embedding of the model, with the absolute positions that `pos_emb` selects."""
    return EmbeddingSpec(
        index=0, vocab=args.padded_vocab_size, hidden=args.hidden_size,
        learned=args.max_position_embeddings if args.pos_emb == "learned" else 0, offset=args.opt_pos_emb_offset,
        sinusoidal=args.pos_emb == "sinusoidal", multiplier=args.embedding_multiplier, dropout=args.hidden_dropout,
        noise=args.neftune_noise_alpha, tied=not args.no_weight_tying, copied="embed_tokens" in copied_modules(args),
        on_last_stage=args.mtp_num_layers is not None,
    )  # fmt: skip
