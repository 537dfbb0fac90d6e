"""The model's layers as data: frozen descriptions (specs), made once from the configuration.

All code that depends on a layer reads its spec: construction, parameters, attention inputs, cache sizes,
FLOPs, partitioning and conversion. So every block may differ from the others. A mixer is attention, Mamba or
Mamba 2; a feed-forward is dense or a mixture of experts. Other kinds are added to the tables in
`model.block`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from megatron.mpu import LoraSpec, LowRank
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.model_args import FULL_BLOCKS
from megatron.neox_arguments.values.lora_settings import block_adapters, copied_modules, lora_scale

Residual = Literal["sequential", "parallel", "olmo3", "sandwich", "single"]

# The epsilons of Transformer-Engine's LayerNormMLP in GPT-NeoX (transformer_engine.py), which ignores the
# keys.
_TE_EPSILON = {"layernorm": 1e-5, "rmsnorm": 1e-8}
# value of `activation` -> name of its function; for gated activations, of the function applied to the gate
_FUNCTIONS = {
    "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "swish": "silu", "swiglu": "silu",
    "bilinear": "identity", "glu": "sigmoid",
}  # fmt: skip


@dataclass(frozen=True)
class NormSpec:
    """A norm of hidden states.

    kind: layernorm, rmsnorm, scalenorm or non_parametric_layernorm.
    width: number of features.
    zero_centered: rmsnorm multiplies by 1 + its weight.
    """

    kind: str
    width: int
    eps: float
    bias: bool
    zero_centered: bool


@dataclass(frozen=True)
class HeadNormSpec:
    """The norms of queries and keys in attention.

    form: layernorm: over all heads, one module for both queries and keys; rmsnorm: each head by itself, one
        module for both; wide: one norm over all queries, one over all keys; per_head: each head by itself,
        one weight for all heads.
    zero_centered: rmsnorm multiplies by 1 + its weight.
    """

    form: str
    head_dim: int
    eps: float
    bias: bool
    zero_centered: bool


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embedding of a layer.

    width: number of dimensions of a head that are rotated.
    base: rope_theta.
    scaling: the value of the key `rope_scaling`; None: this layer's rotary positions are not scaled.
    positions: max_position_embeddings, the length from which scaling stretches, unless `scaling` has an
        original length.
    interleaved: dimensions 2i and 2i + 1 are rotated together; False: dimensions i and i + width / 2.
    """

    width: int
    base: float
    positions: int
    scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    interleaved: bool = False

    @property
    def length_dependent(self) -> bool:
        """Whether rotary frequencies depend on the length of the text."""
        return self.scaling is not None and self.scaling["rope_type"] in ("dynamic", "longrope")


@dataclass(frozen=True)
class RelativeSpec:
    """T5's relative position biases (`pos_emb: rpe`). All blocks share one table."""

    buckets: int
    max_distance: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention with `heads` heads of queries, and `kv_heads` heads of keys and values, of size
    `head_dim`.

    window: number of keys before its own that a query sees; None: all. It is W in flash attention's
        `window_size=(W, 0)`, and one less than transformers' `sliding_window`.
    backend: `attention_backend`; but flash for blocks that `attention_config` lists as flash next to global
        ones.
    scale: factor of the logits; None: 1 / sqrt(head_dim).
    softcap: c; logits x become c tanh(x / c). None: no cap.
    clip: queries, keys and values are clamped to [-clip, clip]; None: they are not clamped.
    sinks: each head's softmax has an additional logit, which is a parameter and has no value vector.
    bias: query_key_value has a bias. output_bias: dense has a bias.
    parallel_residual: its output is summed over tensor ranks together with the feed-forward's
        (gpt_j_residual).
    lora: the low-rank adapters of its linear layers.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rotary: RotarySpec | None
    alibi: bool
    relative: RelativeSpec | None
    norms: HeadNormSpec | None
    scale: float | None
    softcap: float | None
    clip: float | None
    sinks: bool
    bias: bool
    output_bias: bool
    dropout: float
    backend: str
    parallel_residual: bool
    lora: LoraSpec | None = None

    @property
    def biased(self) -> bool:
        """Whether position biases (ALiBi or T5's) are added to attention logits. Every attention call then
        has a mask."""
        return self.alibi or self.relative is not None

    @property
    def inputs(self) -> tuple[int | None, RotarySpec | None, str]:
        """The fields on which `AttentionInputs` depend. Blocks with equal values share their inputs."""
        return self.window, self.rotary, self.backend


@dataclass(frozen=True)
class DenseSpec:
    """A feed-forward: linear2(act(linear1 x)), or linear2(act(gate) * up) if gated.

    width: its inner width.
    activation: a name in `mlp.ACTIVATIONS`, xielu or swigluoai.
    parallel_residual: its output is summed over tensor ranks together with the attention's (gpt_j_residual).
    lora: the low-rank adapters of its linear layers.
    """

    hidden: int
    width: int
    activation: str
    gated: bool
    bias: bool
    parallel_residual: bool
    lora: LoraSpec | None = None


@dataclass(frozen=True)
class RouterSpec:
    """The router of a mixture of experts, which chooses the experts of each token.

    sinkhorn: in training, experts are chosen by scores that Sinkhorn balances over the micro-batch.
    scores: softmax or sigmoid of the logits.
    normalized: the scores of chosen experts are divided by their sum.
    factor: multiplies the scores of chosen experts.
    groups, top_groups: consecutive experts form `groups` groups; experts are chosen from the best
        `top_groups` only.
    bias: the logits have biases.
    bias_update_rate: step of the untrained bias that affects only the choice of experts; None: no such bias.
    jitter: relative noise on the router's input in training; 0: no noise.
    """

    hidden: int
    experts: int
    top_k: int
    sinkhorn: bool
    scores: str
    normalized: bool
    factor: float
    groups: int
    top_groups: int
    bias: bool
    bias_update_rate: float | None
    jitter: float


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: each token's output is the sum of its experts' outputs, weighted by their scores.

    expert: describes one expert.
    capacity_factor: the most tokens that an expert takes, in units of the mean per expert; None: no limit.
    sharded: True: each tensor rank holds a slice of every expert; False: it holds some experts in full.
    shared: a feed-forward that all tokens also go through; None: there is none.
    shared_gate: a sigmoid gate multiplies the output of `shared`.
    latent: experts read a projection of width `expert.hidden`; the sum of their outputs is projected back.
    """

    router: RouterSpec
    expert: DenseSpec
    capacity_factor: float | None
    sharded: bool
    shared: DenseSpec | None
    shared_gate: bool
    latent: bool = False


@dataclass(frozen=True)
class MambaSpec:
    """Mamba's mixer (arXiv 2312.00752): a state of `state` numbers for each of `inner` channels.

    dt_rank: inner width of the projection of time steps.
    conv_kernel: number of tokens that the convolution spans.
    conv_bias: the convolution has biases.
    bias: the linear layers have biases; dt_proj always has one.
    norm_eps: epsilon of the RMSNorms (without weights) of B, C and time steps; None: no norms.
    fp32_params: A_log and D stay fp32 beside 16-bit weights.
    state_fp32: the state is fp32 in any precision.
    lora: the low-rank adapters of in_proj and x_proj.
    """

    hidden: int
    inner: int
    state: int
    dt_rank: int
    conv_kernel: int
    conv_bias: bool
    bias: bool
    norm_eps: float | None
    fp32_params: bool
    state_fp32: bool
    lora: LoraSpec | None = None


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba 2's mixer (arXiv 2405.21060): `heads` heads of `head_dim` channels.

    Each head has one decay and a state `[head_dim, state]`.

    groups: consecutive heads form `groups` groups. A group shares B and C, and the mean square of the gated
        norm.
    conv_kernel: number of tokens that the convolution spans.
    conv_bias, bias: the convolution, and the linear layers, have biases.
    norm_eps: epsilon of the gated norm.
    chunk: tokens per chunk of the scan.
    time_step_limit: (lowest, highest) time step.
    fp32_params: A_log and D stay fp32 beside 16-bit weights.
    state_fp32: the state is fp32 in any precision.
    lora: the low-rank adapters of in_proj.
    """

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    conv_kernel: int
    conv_bias: bool
    bias: bool
    norm_eps: float
    chunk: int
    time_step_limit: tuple[float, float]
    fp32_params: bool
    state_fp32: bool
    lora: LoraSpec | None = None

    @property
    def inner(self) -> int:
        """The number of channels of all heads."""
        return self.heads * self.head_dim


# All kinds of mixers, and all kinds of feed-forwards.
MixerSpec = AttentionSpec | MambaSpec | Mamba2Spec
FeedForwardSpec = DenseSpec | MoESpec


@dataclass(frozen=True)
class EmbeddingSpec:
    """The embedding layer, from tokens to hidden states.

    index: NeoX's layer index.
    vocab: rows of the embedding; None before the tokenizer is known.
    learned: rows of learned positions; 0: none.
    offset: position p reads row p + offset.
    sinusoidal: adds sinusoidal positions.
    multiplier: factor of the token embeddings.
    noise: NEFTune's alpha; None: no noise.
    tied: the output layer has the same weight.
    copied: with adapters, a copy of the weight is trained in its place (`lora.modules_to_save`).
    """

    kind: ClassVar[str] = "embedding"
    index: int
    vocab: int | None
    hidden: int
    learned: int
    offset: int
    sinusoidal: bool
    multiplier: float
    dropout: float
    noise: float | None
    tied: bool
    copied: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """One block: a mixer and a feed-forward, or only one of them (residual: single).

    index: NeoX's layer index.
    norms: by their names in the block; `residual` decides which exist.
    multiplier: factor of what the mixer and the feed-forward add to the residual stream.
    """

    kind: ClassVar[str] = "block"
    index: int
    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None
    norms: Mapping[str, NormSpec]
    residual: Residual
    dropout: float
    multiplier: float = 1.0


@dataclass(frozen=True)
class FinalNormSpec:
    """The norm after the last block.

    index: NeoX's layer index. multiplier: factor of its output, and so of the logits of tokens.
    """

    kind: ClassVar[str] = "norm"
    index: int
    norm: NormSpec
    multiplier: float = 1.0


@dataclass(frozen=True)
class HeadSpec:
    """The output layer, from hidden states to logits.

    index: NeoX's layer index.
    tied: its weight, or the trained copy of it, is the embedding's.
    copied: with adapters, a copy of the weight is trained in its place (`lora.modules_to_save`).
    softcap: c; logits x become c tanh(x / c). None: no cap.
    """

    kind: ClassVar[str] = "head"
    index: int
    hidden: int
    vocab: int | None
    tied: bool
    copied: bool = False
    softcap: float | None = None


@dataclass(frozen=True)
class ScoreSpec:
    """The output layer of a reward model, from hidden states to one score per token."""

    kind: ClassVar[str] = "score"
    index: int
    hidden: int


LayerSpec = EmbeddingSpec | BlockSpec | FinalNormSpec | HeadSpec | ScoreSpec


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


def rotary_spec(args: ModelArgs, *, local: bool = False) -> RotarySpec:
    """Returns the rotary settings of the model's layers.

    local: for layers with a window. If `rope_local_base_freq` is set, these layers have it as base, without
        scaling. Otherwise they have the settings of all layers.
    """
    # NeoX rounds the rotated width down to an even number of dimensions.
    width, positions = int(args.head_dim * args.rotary_pct) // 2 * 2, args.max_position_embeddings
    if local and args.rope_local_base_freq is not None:
        return RotarySpec(width, args.rope_local_base_freq, positions, interleaved=args.rotary_interleaved)
    return RotarySpec(width, args.rotary_emb_base, positions, args.rope_scaling, args.rotary_interleaved)


def head_norm_spec(args: ModelArgs) -> HeadNormSpec | None:
    """Returns the norms of queries and keys; None without use_qk_layernorm."""
    if not args.use_qk_layernorm:
        return None
    form, eps = norm_kind(args), args.rms_norm_epsilon
    if args.use_separate_qk_norms:
        form = "per_head" if args.qk_norm_per_head else "wide"
    elif form == "layernorm":
        eps = args.layernorm_epsilon
    return HeadNormSpec(form, args.head_dim, eps, _has_norm_bias(args), args.zero_centered_gamma)


def _block_value(value: int | tuple[int, ...], block: int) -> int:
    return value[block] if isinstance(value, tuple) else value


def attention_spec(args: ModelArgs, block: int) -> AttentionSpec | None:
    """Returns the attention of block number `block`, counted from 0; None if the block has another mixer."""
    if args.attention_config[block] not in (*FULL_BLOCKS, "attention"):
        return None
    slides = args.layer_types is None or args.layer_types[block] == "sliding_attention"
    width = args.sliding_window_width if slides else None
    # A window as wide as the longest sequence hides nothing, so it counts as no window.
    window = width if width is not None and width < args.max_position_embeddings - 1 else None
    turns = args.pos_emb == "rotary" and (args.no_rope_layers is None or args.no_rope_layers[block] == 1)
    named_flash = args.attention_config[block] == "flash" and "global" in args.attention_config
    relative = RelativeSpec(args.rpe_num_buckets, args.rpe_max_distance, args.num_attention_heads, args.head_dim)
    return AttentionSpec(
        hidden=args.hidden_size, heads=args.num_attention_heads, kv_heads=_block_value(args.kv_heads, block),
        head_dim=args.head_dim, window=window, rotary=rotary_spec(args, local=slides) if turns else None,
        alibi=args.pos_emb == "alibi", relative=relative if args.pos_emb == "rpe" else None, norms=head_norm_spec(args),
        scale=attention_scale(args), softcap=args.attn_logit_softcapping, clip=args.clip_qkv,
        sinks=args.attention_sinks, bias=args.use_bias_in_attn_linear or args.add_qkv_bias,
        output_bias=args.use_bias_in_attn_linear, dropout=args.attention_dropout,
        backend="flash" if named_flash else args.attention_backend, parallel_residual=args.gpt_j_residual,
        lora=lora_spec(args, block),
    )  # fmt: skip


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
    )  # fmt: skip
