"""The model's layers as data: frozen descriptions (specs), made once from the configuration.

All code that depends on a layer reads its spec: construction, parameters, attention inputs, cache sizes,
FLOPs, partitioning and conversion. So every block may differ from the others. A mixer is attention, latent
attention, Mamba, Mamba 2 or Gated DeltaNet; a feed-forward is dense or a mixture of experts. Other kinds are
added to the tables in `model.block`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from megatron.mpu import LoraSpec

Residual = Literal["sequential", "parallel", "olmo3", "sandwich", "single"]


@dataclass(frozen=True)
class NormSpec:
    """A norm of hidden states.

    kind: layernorm, rmsnorm, scalenorm or non_parametric_layernorm. width: number of features.
    zero_centered: rmsnorm and layernorm multiply by 1 + their weight.
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
    zero_centered: norms multiply by 1 + their weight.
    after_rotary: queries and keys are rotated first.
    """

    form: str
    head_dim: int
    eps: float
    bias: bool
    zero_centered: bool
    after_rotary: bool = False


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
    output_gate: a head's output is multiplied by the sigmoid of a gate, which is projected with its queries.
    keys_are_values: values are the projected keys, before their norm and rotation.
    value_norm_eps: epsilon of values' RMSNorm, of each head and without weights; None: no such norm.
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
    output_gate: bool = False
    keys_are_values: bool = False
    value_norm_eps: float | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """The parts of the fused projection, by HuggingFace's names."""
        return ("q_proj", "k_proj") if self.keys_are_values else ("q_proj", "k_proj", "v_proj")

    @property
    def biased(self) -> bool:
        """Whether position biases (ALiBi or T5's) are added to attention logits. Every attention call then
        has a mask."""
        return self.alibi or self.relative is not None

    @property
    def fits_ring(self) -> bool:
        """Whether ring attention supports it.

        It is softmax(q k^T * scale) v over all earlier keys, and nothing else, on no other backend than
        flash.
        """
        is_plain = not (self.window is not None or self.biased or self.softcap or self.sinks or self.dropout > 0.0)
        return is_plain and self.backend in ("auto", "flash")

    @property
    def inputs(self) -> tuple[int | None, RotarySpec | None, str]:
        """The fields on which `AttentionInputs` depend. Blocks with equal values share their inputs."""
        return self.window, self.rotary, self.backend

    @property
    def value_dim(self) -> int:
        """The size of a value head."""
        return self.head_dim

    @property
    def cached(self) -> "AttentionSpec":
        """The attention over keys and values in a cache."""
        return self


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Multi-head latent attention (MLA, arXiv 2405.04434), as in DeepSeek V2 and V3.

    A token's keys and values are made from a latent, which a norm follows, and from a rotary key that all
    heads share. A head of queries and keys, of size `head_dim`, is [nope_dim | rope_dim]; the last
    `rope_dim` dimensions have rotary positions.

    latent: width of the latent of keys and values.
    query_latent: width of the latent that queries are made from; None: they are made from hidden states.
    v_head_dim: size of a value head.
    latent_eps: epsilon of the latents' RMSNorms.
    bias: the projections to latents have biases.
    """

    latent: int
    query_latent: int | None
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    latent_eps: float

    @property
    def value_dim(self) -> int:
        return self.v_head_dim

    @property
    def cached(self) -> AttentionSpec:
        """The absorbed form: all heads read one key per token, [latent | rotary key], which is also the
        value."""
        width = self.latent + self.rope_dim
        return replace(self, kv_heads=1, head_dim=width, v_head_dim=width)


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
    group_score: score of a group: the sum of its two best scores (best_two), or its best score (best).
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
    group_score: str
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
    conv_kernel: number of tokens that the convolution spans. conv_bias: it has biases.
    bias: the linear layers have biases; dt_proj always has one.
    norm_eps: epsilon of the RMSNorms (without weights) of B, C and time steps; None: no norms.
    fp32_params, state_fp32: A_log and D, and the state, are fp32 in any precision.
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

    groups: groups of consecutive heads. A group shares B, C and the mean square of the gated norm.
    conv_kernel: number of tokens that the convolution spans.
    conv_bias, bias: the convolution, and the linear layers, have biases.
    norm_eps: epsilon of the gated norm.
    chunk: tokens per chunk of the scan. time_step_limit: (lowest, highest) time step.
    fp32_params, state_fp32: A_log and D, and the state, are fp32 in any precision.
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


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """Gated DeltaNet (arXiv 2412.06464): each of `heads` heads has a state `[key_dim, value_dim]`.

    key_heads: number of heads of queries and keys; consecutive heads share one.
    conv_kernel: number of tokens that the convolution of queries, keys and values spans.
    norm_eps: epsilon of the gated norm. chunk: tokens per chunk of the scan.
    fp32_params: A_log stays fp32 beside 16-bit weights.
    lora: the low-rank adapters of its linear layers.
    """

    hidden: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    chunk: int
    fp32_params: bool
    lora: LoraSpec | None = None

    @property
    def keys(self) -> int:
        """The number of channels of all keys; queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The number of channels of the values of all heads."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class KimiDeltaAttentionSpec(GatedDeltaNetSpec):
    """Kimi Delta Attention (arXiv 2510.26692): each dimension of a key has its decay. Heads share no keys.

    The projections of decays and of the gate have the rank of a head's width."""


@dataclass(frozen=True)
class ShortConvSpec:
    """The gated short convolution of LFM 2: C conv(B x), where B, C and x are projections of the input.

    conv_kernel: number of tokens that the convolution spans; their inputs are the state.
    bias: the linear layers and the convolution have biases. lora: the low-rank adapters of in_proj.
    """

    hidden: int
    conv_kernel: int
    bias: bool
    lora: LoraSpec | None = None


# All kinds of mixers, those with a state, and all kinds of feed-forwards.
StateMixerSpec = MambaSpec | Mamba2Spec | GatedDeltaNetSpec | ShortConvSpec
MixerSpec = AttentionSpec | StateMixerSpec
FeedForwardSpec = DenseSpec | MoESpec


@dataclass(frozen=True)
class EmbeddingSpec:
    """The embedding layer, from tokens to hidden states.

    index: NeoX's layer index. vocab: rows of the embedding; None before the tokenizer is known.
    learned: rows of learned positions; 0: none. offset: position p reads row p + offset.
    sinusoidal: adds sinusoidal positions.
    multiplier: factor of the token embeddings. noise: NEFTune's alpha; None: no noise.
    tied: the output layer has the same weight.
    on_last_stage: the last pipeline stage has a copy of the layer, for multi-token prediction.
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
    on_last_stage: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """One block: a mixer and a feed-forward, or only one of them (residual: single).

    index: NeoX's layer index.
    norms: by their names in the block; `residual` decides which exist.
    multiplier: factor of what the mixer and the feed-forward add to the residual stream.
    scalar: the block's output is multiplied by an untrained parameter.
    """

    kind: ClassVar[str] = "block"
    index: int
    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None
    norms: Mapping[str, NormSpec]
    residual: Residual
    dropout: float
    multiplier: float = 1.0
    scalar: bool = False


@dataclass(frozen=True)
class FinalNormSpec:
    """The norm after the last block.

    index: NeoX's layer index. multiplier: factor of its output, and so of the logits of tokens.
    """

    kind: ClassVar[str] = "norm"
    index: int
    norm: NormSpec
    multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PredictionSpec(BlockSpec):
    """A block for multi-token prediction, with the layers before and after it (`model.prediction`).

    input_norm: of the embedding, and of the hidden states, which are then projected together.
    final_norm: of the block's output. final_multiplier: factor of the final norm's output.
    embedding: the model's embedding layer, which it also uses.
    """

    kind: ClassVar[str] = "prediction"
    input_norm: NormSpec
    final_norm: NormSpec
    final_multiplier: float
    embedding: EmbeddingSpec


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
