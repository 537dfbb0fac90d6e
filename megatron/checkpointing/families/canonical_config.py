"""Converts configurations to a canonical form, so that two models can be compared.

In this form keys without effect are absent, and all defaults are filled in.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from megatron.model import block_specs
from megatron.model.build_specs import attention_scale, has_one_norm, norm_kind, norm_spec, rotary_spec
from megatron.model.positions import longrope_factor
from megatron.model.specs import (
    AttentionSpec,
    BlockSpec,
    DenseSpec,
    FeedForwardSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    MoESpec,
    RotarySpec,
    ShortConvSpec,
)
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.model_args import ATTENTION_BLOCKS, FULL_BLOCKS

_SAME_ACTIVATION = {"swish": "silu"}


def canonical_config(args: ModelArgs) -> dict[str, Any]:
    """Returns the configuration values that decide the logits, by key, in canonical form.

    Two configurations give equal results exactly if models with equal weights have equal logits."""
    kind, norm = norm_kind(args), norm_spec(args)
    epsilons = {"rmsnorm": "rms_norm_epsilon", "scalenorm": "scalenorm_epsilon"}
    epsilon = epsilons.get(kind, "layernorm_epsilon")
    tanh = args.bias_gelu_fusion or args.te_layernorm_mlp
    activation = _SAME_ACTIVATION.get(args.activation, args.activation)
    if (activation == "gelu" and tanh) or (activation == "geglu" and args.te_layernorm_mlp):
        activation += "_tanh"
    blocks = block_specs(args)
    mixers = [block.mixer for block in blocks if isinstance(block.mixer, AttentionSpec)]
    dense = [block.feed_forward for block in blocks if isinstance(block.feed_forward, DenseSpec)]
    # Block kinds that compute the same get one name.
    attending = {*FULL_BLOCKS} & {*ATTENTION_BLOCKS}
    kinds = ["global" if kind_name in attending else kind_name for kind_name in args.attention_config]
    canonical = {
        "num_layers": args.num_layers,
        "attention_config": kinds,
        "hidden_size": args.hidden_size,
        "intermediate_size": _common_value(spec.width for spec in dense),
        "norm": kind,
        epsilon: norm.eps,
        "zero_centered_gamma": args.zero_centered_gamma,
        "use_bias_in_norms": norm.bias,
        "epsilon of the MLP's norm": norm_spec(args, in_te_mlp=args.te_layernorm_mlp).eps,
        "no_weight_tying": args.no_weight_tying,
        "score_head": args.score_head,
        "use_bias_in_mlp": bool(dense) and args.use_bias_in_mlp,
        "final_logit_softcapping": None if args.score_head else args.final_logit_softcapping,
        "embedding_multiplier": args.embedding_multiplier,
        "residual_multiplier": float(f"{args.residual_multiplier:.12g}"),
        "logit_scale": 1.0 if args.score_head else float(f"{args.logit_scale:.12g}"),
        "layer_scalar": args.layer_scalar,
        "pos_emb": args.pos_emb,
    }
    if any(block.feed_forward is not None for block in blocks):
        canonical["activation"] = activation
    if not {*kinds}.isdisjoint(FULL_BLOCKS):
        canonical["norm_placement"] = args.norm_placement
        canonical["gpt_j_residual"] = args.gpt_j_residual
        canonical["gpt_j_tied"] = has_one_norm(args)
    if mixers:
        canonical |= {**_attention(args, mixers), **_rotary(args, mixers)}
    elif args.pos_emb not in ("learned", "sinusoidal"):
        canonical["pos_emb"] = "none"  # all other positions act in attention only
    if canonical["pos_emb"] != "none" or mixers:
        canonical["max_position_embeddings"] = args.max_position_embeddings
    return {**canonical, **_states(blocks), **_experts([block.feed_forward for block in blocks])}


def _attention(args: ModelArgs, mixers: list[AttentionSpec]) -> dict[str, Any]:
    """Returns the values of attention keys that decide the logits, except those of position keys."""
    norms = {
        "use_separate_qk_norms": args.use_separate_qk_norms,
        "qk_norm_per_head": args.qk_norm_per_head,
        "qk_norm_after_rotary": args.qk_norm_after_rotary,
    }
    return {
        **_latent(args, mixers[0]),
        "num_attention_heads": args.num_attention_heads,
        "num_kv_heads": _common_value(mixer.kv_heads for mixer in mixers),
        "head_dim": _common_value(mixer.head_dim for mixer in mixers),
        "attention_k_eq_v": _common_value(mixer.keys_are_values for mixer in mixers),
        "use_v_norm": args.use_v_norm,
        "use_qk_layernorm": args.use_qk_layernorm,
        **(norms if args.use_qk_layernorm else {}),
        "use_bias_in_attn_linear": args.use_bias_in_attn_linear,
        "add_qkv_bias": args.use_bias_in_attn_linear or args.add_qkv_bias,
        "attention_multiplier": float(f"{attention_scale(args) or args.head_dim**-0.5:.12g}"),
        "attn_logit_softcapping": args.attn_logit_softcapping,
        "clip_qkv": args.clip_qkv,
        "attention_sinks": args.attention_sinks,
        "attention_output_gate": args.attention_output_gate,
        "layer_types": [mixer.window is not None for mixer in mixers],
        "sliding_window_width": _common_value(mixer.window for mixer in mixers if mixer.window is not None),
    }


def _latent(args: ModelArgs, mixer: AttentionSpec) -> dict[str, Any]:
    """Returns the values of latent attention's keys that decide the logits."""
    if not isinstance(mixer, LatentAttentionSpec):
        return {"kv_lora_rank": None}
    return {
        "kv_lora_rank": mixer.latent,
        "q_lora_rank": mixer.query_latent,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.v_head_dim,
        "latent_norm_epsilon": mixer.latent_eps,
    }


def _states(blocks: Sequence[BlockSpec]) -> dict[str, Any]:
    """Returns the values of keys that decide the logits of blocks with states; {} without such blocks."""
    mamba = [block.mixer for block in blocks if isinstance(block.mixer, MambaSpec)]
    mamba2 = [block.mixer for block in blocks if isinstance(block.mixer, Mamba2Spec)]
    all_mixers: list[MambaSpec | Mamba2Spec] = [*mamba, *mamba2]
    canonical: dict[str, Any] = {}
    if all_mixers:
        canonical |= {
            "mamba_state_dim": _common_value(mixer.state for mixer in all_mixers),
            "mamba_conv_kernel": all_mixers[0].conv_kernel,
            "mamba_use_bias_in_conv": all_mixers[0].conv_bias,
            "mamba_use_bias_in_linears": all_mixers[0].bias,
        }
    if mamba:
        canonical |= {
            "mamba_expand": mamba[0].inner // mamba[0].hidden,
            "mamba_dt_rank": mamba[0].dt_rank,
            "mamba_bcdt_norm_epsilon": mamba[0].norm_eps,
        }
    if mamba2:
        canonical |= {
            "mamba_num_heads": mamba2[0].heads,
            "mamba_head_dim": mamba2[0].head_dim,
            "mamba_num_groups": mamba2[0].groups,
            "mamba_time_step_limit": mamba2[0].time_step_limit,
        }
    nets = [block.mixer for block in blocks if isinstance(block.mixer, GatedDeltaNetSpec)]
    if nets:
        canonical |= {
            "linear_num_key_heads": nets[0].key_heads,
            "linear_num_value_heads": nets[0].heads,
            "linear_key_head_dim": nets[0].key_dim,
            "linear_value_head_dim": nets[0].value_dim,
            "linear_conv_kernel_dim": nets[0].conv_kernel,
        }
    convolutions = [block.mixer for block in blocks if isinstance(block.mixer, ShortConvSpec)]
    if convolutions:
        canonical |= {
            "short_conv_kernel": convolutions[0].conv_kernel,
            "use_bias_in_short_conv": convolutions[0].bias,
        }
    return canonical


def _experts(feeds: Sequence[FeedForwardSpec | None]) -> dict[str, Any]:
    """Returns the values of router and expert keys that decide the logits at inference.

    The capacity of experts is left out."""
    mixtures = [feed for feed in feeds if isinstance(feed, MoESpec)]
    if not mixtures:
        return {"moe_num_experts": 1}
    mixture = mixtures[0]
    router, shared = mixture.router, mixture.shared
    return {
        "moe_num_experts": router.experts,
        "moe_layer_freq": [int(isinstance(feed, MoESpec)) for feed in feeds],
        "moe_intermediate_size": mixture.expert.width,
        "moe_latent_size": mixture.expert.hidden if mixture.latent else None,
        "moe_expert_bias": mixture.expert.bias,
        "moe_shared_expert_intermediate_size": None if shared is None else shared.width,
        "moe_shared_expert_gate": mixture.shared_gate,
        "moe_top_k": router.top_k,
        "moe_router_score_function": router.scores,
        "norm_topk_prob": router.normalized,
        "moe_router_topk_scaling_factor": router.factor,
        "moe_router_num_groups": (router.groups, router.top_groups) if router.top_groups < router.groups else None,
        "moe_router_group_score": router.group_score if router.top_groups < router.groups else None,
        "moe_router_bias": router.bias,
        "moe_router_bias_update_rate": router.bias_update_rate is not None,
    }


def _common_value(values: Iterable[Any]) -> Any:
    """Returns the value that all layers share; if they differ, a list of all; None if there are no values."""
    layer_values = list(values)
    return layer_values if len(set(layer_values)) > 1 else next(iter(layer_values), None)


def _rotary(args: ModelArgs, mixers: list[AttentionSpec]) -> dict[str, Any]:
    if args.pos_emb != "rotary":
        return {}
    rotaries, default = [mixer.rotary for mixer in mixers], rotary_spec(args)
    return {
        "rotary_pct": _common_value(rotary.width for rotary in rotaries if rotary is not None),
        "rotary_interleaved": args.rotary_interleaved,
        "no_rope_layers": [int(rotary is not None) for rotary in rotaries],
        "rotary_emb_base, rope_scaling, rope_local_base_freq": [_frequencies(rotary or default) for rotary in rotaries],
    }


def _frequencies(rotary: RotarySpec) -> tuple[float, dict[str, Any] | None]:
    if rotary.scaling is None:
        return float(rotary.base), None
    scaling = {name: value for name, value in rotary.scaling.items() if value is not None}
    if scaling["rope_type"] == "proportional":
        return float(rotary.base), {"factor": 1.0, **scaling}
    if scaling["rope_type"] != "linear":
        trained = scaling.setdefault("original_max_position_embeddings", rotary.positions)
        if scaling["rope_type"] == "longrope":
            scaling.setdefault("attention_factor", longrope_factor(trained, rotary.positions))
        if scaling["rope_type"] == "yarn":
            scaling.setdefault("truncate", True)
    return float(rotary.base), scaling


# Explains keys in the error that lists how two models differ. Keys that explain themselves are left out.
_WORDS = {
    "num_layers": "layers", "attention_config": "kinds of blocks", "hidden_size": "width",
    "num_attention_heads": "heads", "num_kv_heads": "heads of keys and values",
    "intermediate_size": "width of the MLP", "norm": "norms", "use_bias_in_norms": "biases in norms",
    "zero_centered_gamma": "zero-centered norm weights", "norm_placement": "placement of norms", "pos_emb": "positions",
    "gpt_j_residual": "attention and MLP in parallel", "gpt_j_tied": "one norm for attention and MLP",
    "no_weight_tying": "head not tied to the embedding", "use_qk_layernorm": "norms of queries and keys",
    "qk_norm_after_rotary": "norms of queries and keys after rotation",
   
    "use_bias_in_attn_linear": "biases in attention", "add_qkv_bias": "biases of queries, keys and values",
    "attention_multiplier": "factor of attention logits", "attn_logit_softcapping": "cap of attention logits",
    "final_logit_softcapping": "cap of logits", "clip_qkv": "clamp of queries, keys and values",
    "attention_k_eq_v": "values that are keys", "use_v_norm": "norms of values",
    "layer_scalar": "a factor of each block's output",
    "attention_sinks": "attention sinks", "attention_output_gate": "gate of attention's output",
    "embedding_multiplier": "factor of embeddings", "residual_multiplier": "factor of block outputs",
    "logit_scale": "factor of logits", "rotary_interleaved": "interleaved rotary dimensions",
    "use_bias_in_mlp": "biases in the MLP",
    "layer_types": "layers with a sliding window", "sliding_window_width": "window",
    "max_position_embeddings": "longest sequence", "rotary_pct": "rotated dimensions per head",
    "no_rope_layers": "layers with rotary positions",
    "moe_num_experts": "experts", "moe_layer_freq": "layers with experts",
    "moe_intermediate_size": "width of an expert", "moe_expert_bias": "biases in experts",
    "moe_latent_size": "size of the experts' latent input",
    "moe_shared_expert_intermediate_size": "width of the shared expert",
    "moe_shared_expert_gate": "gate of the shared expert",
    "moe_top_k": "experts per token", "moe_router_score_function": "score function of the router",
    "norm_topk_prob": "a token's scores add up to 1", "moe_router_topk_scaling_factor": "factor of router scores",
    "kv_lora_rank": "width of latents in attention", "q_lora_rank": "width of queries' latents",
    "qk_nope_head_dim": "dimensions without positions", "qk_rope_head_dim": "dimensions with rotary positions",
    "v_head_dim": "width of a head's values", "latent_norm_epsilon": "epsilon of latents' norms",
    "moe_router_num_groups": "groups of experts", "moe_router_group_score": "score of a group of experts",
    "moe_router_bias": "bias of the router",
    "moe_router_bias_update_rate": "biases for choosing experts",
    "mamba_state_dim": "size of Mamba's state", "mamba_expand": "Mamba's channels / hidden_size",
    "mamba_conv_kernel": "kernel size of Mamba's convolution", "mamba_use_bias_in_conv": "bias of Mamba's convolution",
    "mamba_use_bias_in_linears": "biases of Mamba's linears", "mamba_dt_rank": "rank of Mamba's time steps",
    "mamba_bcdt_norm_epsilon": "norms of B, C and time steps", "mamba_num_heads": "heads of Mamba 2",
    "mamba_head_dim": "channels per head of Mamba 2", "mamba_num_groups": "groups of heads of Mamba 2",
    "mamba_time_step_limit": "lowest and highest time step",
    "linear_num_key_heads": "key heads of Gated DeltaNet", "linear_num_value_heads": "heads of Gated DeltaNet",
    "linear_key_head_dim": "width of its keys", "linear_value_head_dim": "width of its values",
    "linear_conv_kernel_dim": "kernel size of its convolution",
    "short_conv_kernel": "kernel size of short convolutions", "use_bias_in_short_conv": "biases of short convolutions",
}  # fmt: skip
_NORM_KEYS = {
    "layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon", "epsilon of the MLP's norm", "use_bias_in_norms",
}  # fmt: skip


def describe_differences(run: dict[str, Any], converted: dict[str, Any]) -> list[str]:
    """Returns a line for each difference of two models, with the key and both values.

    run: the model's `canonical_config`; converted: that of the model after conversion to a HuggingFace
        family. A difference that follows from another is left out."""
    differing = [name for name in {**run, **converted} if run.get(name) != converted.get(name)]
    if "attention_config" in differing:
        differing = [name for name in differing if name in run and name in converted and name != "moe_layer_freq"]
    if "pos_emb" in differing:
        differing = [name for name in differing if name in run and name in converted or name == "pos_emb"]
    if 1 in (run["moe_num_experts"], converted["moe_num_experts"]):
        differing = [name for name in differing if name in run and name in converted]
    if "norm" in differing:
        differing = [name for name in differing if name not in _NORM_KEYS]
    return [
        f"{_described(name)}: {_short(converted.get(name))} after conversion, {_short(run.get(name))} in this model"
        for name in differing
    ]


def _described(name: str) -> str:
    return f"{_WORDS[name]} ({name})" if name in _WORDS else name


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    is_constant = isinstance(value, (list, tuple)) and len(value) > 1 and all(item == value[0] for item in value)
    text = f"{value[0]} (all layers)" if is_constant else str(value)
    return text if len(text) < 80 else text[:77] + "..."
