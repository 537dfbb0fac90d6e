"""One transformer block: a mixer and a feed-forward, or only one of them, with their norms and residual
connections."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron.model.attention import AttentionBackends, AttentionInputs, LatentAttention, SelfAttention
from megatron.model.cache import LayerCache, StateCache
from megatron.model.delta import GatedDeltaNet, KimiDeltaAttention
from megatron.model.mamba import Mamba, Mamba2, ScanKernels, ShortConv, StateInputs
from megatron.model.mlp import MLP
from megatron.model.moe import MoE, RoutingSums
from megatron.model.norms import NORMS, Norm, build_norm
from megatron.model.specs import BlockSpec
from megatron.mpu import (
    Linear,
    ParallelGroups,
    ParamSpec,
    PartialSum,
    allocate,
    dropout,
    mix_seed,
    row_parallel_sum,
    seed_tensor,
    with_prefix,
)
from megatron.neox_arguments import ModelArgs

Mix = Callable[[Tensor], Tensor]
Feed = Callable[[Tensor], tuple[Tensor, RoutingSums | None]]


class SubLayer(Protocol):
    """The interface of a mixer (in which tokens see each other) or of a feed-forward (which reads each token
    alone).

    Spec: the frozen dataclass that describes it.
    spec: returns its `Spec` from the configuration and the number of a block, counted from 0; None if the
        block has another kind of sublayer.
    module_name: only mixers have it: GPT-NeoX's name of the module in the block.
    params: returns the parameters that the constructor allocates for a `Spec`.
    core: computes everything before the last linear layer, which is row-parallel, from `[seq, batch,
        hidden]`. A mixer's takes (x, inputs, dropout seed, cache, adapter seed); inputs are
        `AttentionInputs`, or `StateInputs` if it has a state. A feed-forward's takes (x, adapter seed,
        token_mask as in `Router`), and also returns its `RoutingSums`, or None without a router.
    output: the last linear layer, or a `PartialSum` that sums the outputs of tensor ranks.

    The constructor takes (spec, groups, sequence_parallel). A mixer's also takes `backends`, its kernels.
    """

    Spec: type
    spec: Callable[[ModelArgs, int], Any]
    params: Callable[[Any], tuple[ParamSpec, ...]]
    core: Callable[..., Any]
    output: Linear | PartialSum


# The kinds of sublayers. A block has the first kind whose `spec` is not None, or none of them. To add a kind,
# write a class in its own file, and an entry here.
MIXERS: tuple[type[Any], ...] = (
    LatentAttention, SelfAttention, Mamba, Mamba2, KimiDeltaAttention, GatedDeltaNet, ShortConv,
)  # fmt: skip
FEED_FORWARDS: tuple[type[Any], ...] = (MoE, MLP)
# The modules of a block in GPT-NeoX's order, under GPT-NeoX's names.
_SUBMODULES = (
    "norm", "mixer", "input_layernorm", "attention", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "mlp",
)  # fmt: skip


def sublayer_spec(table: Sequence[type[Any]], args: ModelArgs, block: int) -> Any:
    """Returns the spec of the sublayer that block number `block` has, by the first class in `table` that
    returns one.

    Returns None if the block has no such sublayer. table: `MIXERS` or `FEED_FORWARDS`.
    """
    return next((spec for kind in table if (spec := kind.spec(args, block)) is not None), None)


class DropoutSeeds(NamedTuple):
    """A block's random seeds (`seed_tensor`) for one micro-batch; None if nothing random is drawn.

    attention: for dropout of attention probabilities.
    mixer, feed_forward: for dropout of their outputs.
    adapters: for dropout of adapters' inputs, and for the jitter of routers.
    """

    attention: Tensor | None = None
    mixer: Tensor | None = None
    feed_forward: Tensor | None = None
    adapters: Tensor | None = None


class Block(nn.Module):
    """A transformer block. Input and output are `[seq, batch, hidden]`, or `[seq/T, ..]` under sequence
    parallelism.

    checkpoint: runs a function on the block's input, and recomputes its activations in the backward pass
        (`training.recompute`); None: all activations are saved.
    """

    checkpoint: Callable[[Callable[[Tensor], Any], Tensor], Any] | None = None

    attention: SubLayer
    mixer: SubLayer
    mlp: SubLayer
    norm: Norm
    input_layernorm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm
    layer_scalar: nn.Parameter | None

    def __init__(
        self,
        spec: BlockSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: AttentionBackends | ScanKernels | None,
    ) -> None:
        super().__init__()
        self.residual = spec.residual
        self.hidden_dropout, self.multiplier = spec.dropout, spec.multiplier
        # Activations are full on every tensor rank, so dropout masks must be equal. Under sequence
        # parallelism each rank has other tokens, so the masks must differ.
        self.seed_offset = groups.rank("tensor") if sequence_parallel else 0
        self.tensor_rank = groups.rank("tensor")  # each tensor rank has other attention heads
        self.context_offset = groups.rank("context") * groups.size("tensor")  # each context rank has other tokens
        self.one_norm = "post_attention_layernorm" not in spec.norms
        mixer, feed_forward = kind_of(MIXERS, spec.mixer), kind_of(FEED_FORWARDS, spec.feed_forward)
        self.mixer_name = None if mixer is None else mixer.module_name
        for name in _SUBMODULES:
            if name == self.mixer_name:
                setattr(self, name, mixer(spec.mixer, groups, sequence_parallel, backends=backends))
            elif name == "mlp" and feed_forward is not None:
                self.mlp = feed_forward(spec.feed_forward, groups, sequence_parallel)
            elif name in spec.norms:
                setattr(self, name, build_norm(spec.norms[name], groups, sequence_parallel))
        allocate(self, self._scalar(spec), groups, "layer_scalar")

    @staticmethod
    def _scalar(spec: BlockSpec) -> tuple[ParamSpec, ...]:
        return (ParamSpec("layer_scalar", (1,), init="ones", trained=False),) if spec.scalar else ()

    @staticmethod
    def params(spec: BlockSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates, in GPT-NeoX's registration
        order."""
        params = {name: NORMS[norm.kind].params(norm) for name, norm in spec.norms.items()}
        mixer, feed_forward = kind_of(MIXERS, spec.mixer), kind_of(FEED_FORWARDS, spec.feed_forward)
        if mixer is not None:
            params[mixer.module_name] = mixer.params(spec.mixer)
        if feed_forward is not None:
            params["mlp"] = feed_forward.params(spec.feed_forward)
        module_params = (param for name in _SUBMODULES for param in with_prefix(name, params.get(name, ())))
        return (*module_params, *Block._scalar(spec))

    def seeds(self, *parts: int) -> DropoutSeeds:
        """Returns the seeds of this rank's dropout for one micro-batch.

        Ranks get different seeds where their activations differ, else equal ones.

        parts: the numbers on which the seeds depend: micro-batch seed and layer.
        """
        offsets = (self.tensor_rank, self.seed_offset, self.seed_offset, 0)
        seeds = (mix_seed(*parts, i) + self.context_offset + offset for i, offset in enumerate(offsets))
        return DropoutSeeds(*map(seed_tensor, seeds))

    def forward(
        self,
        x: Tensor,
        inputs: AttentionInputs | StateInputs | None,
        seeds: DropoutSeeds,
        cache: LayerCache | StateCache | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, RoutingSums | None]:
        """Runs the block on `x`; returns its output, and the sums of its router (None without a router).

        inputs: attention inputs or state inputs of this block; None without a mixer.
        seeds: from `Block.seeds`.
        cache: this block's keys and values, or states, in generation; None in training.
        token_mask: `[seq, batch]` boolean, False for padding, which goes to no expert; None: no padding.
        """

        def mix(x: Tensor) -> Tensor:
            return self._mixer.core(x, inputs, seeds.attention, cache, seeds.adapters)

        def feed(x: Tensor) -> tuple[Tensor, RoutingSums | None]:
            return self.mlp.core(x, seeds.adapters, token_mask)

        def run(x: Tensor) -> tuple[Tensor, RoutingSums | None]:
            out, routed = _RESIDUAL_FORMS[self.residual](self, x, mix, feed, seeds)
            return out if self.layer_scalar is None else out * self.layer_scalar.to(out.dtype), routed

        return run(x) if self.checkpoint is None or not torch.is_grad_enabled() else self.checkpoint(run, x)

    def _added(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Returns what a sublayer's output `x` adds to the residual stream: dropout(x) * multiplier. seed:
        None: no dropout.
        """
        x = x if seed is None else dropout(x, self.hidden_dropout, seed, self.training)
        return x if self.multiplier == 1.0 else x * self.multiplier

    @property
    def _mixer(self) -> SubLayer:
        return self.attention if self.mixer_name == "attention" else self.mixer

    def _mixed(self, inner: Tensor, seeds: DropoutSeeds) -> Tensor:
        return self._mixer.output(inner, seeds.adapters)

    def _fed(self, x: Tensor, feed: Feed, seeds: DropoutSeeds) -> tuple[Tensor, RoutingSums | None]:
        inner, routed = feed(x)
        return self.mlp.output(inner, seeds.adapters), routed

    def _single(self, x: Tensor, mix: Mix, feed: Feed, seeds: DropoutSeeds) -> tuple[Tensor, RoutingSums | None]:
        """Computes x + mixer(norm x), or x + mlp(norm x): a block with one sublayer, as in Mamba and hybrid
        models."""
        if self.mixer_name is not None:
            return x + self._added(self._mixed(mix(self.norm(x)), seeds), seeds.mixer), None
        fed, routed = self._fed(self.norm(x), feed, seeds)
        return x + self._added(fed, seeds.feed_forward), routed

    def _sequential(self, x: Tensor, mix: Mix, feed: Feed, seeds: DropoutSeeds) -> tuple[Tensor, RoutingSums | None]:
        """Computes h = x + attn(ln1 x), then h + mlp(ln2 h): GPT-2's pre-norm block."""
        x = x + self._added(self._mixed(mix(self.input_layernorm(x)), seeds), seeds.mixer)
        fed, routed = self._fed(self.post_attention_layernorm(x), feed, seeds)
        return x + self._added(fed, seeds.feed_forward), routed

    def _olmo3(self, x: Tensor, mix: Mix, feed: Feed, seeds: DropoutSeeds) -> tuple[Tensor, RoutingSums | None]:
        """Computes h = x + ln1(attn x), then h + ln2(mlp h): OLMo 2 and 3 normalise the outputs of
        sublayers."""
        x = x + self._added(self.post_attention_layernorm(self._mixed(mix(x), seeds)), seeds.mixer)
        fed, routed = self._fed(x, feed, seeds)
        return x + self._added(self.post_feedforward_layernorm(fed), seeds.feed_forward), routed

    def _sandwich(self, x: Tensor, mix: Mix, feed: Feed, seeds: DropoutSeeds) -> tuple[Tensor, RoutingSums | None]:
        """Computes h = x + ln2(attn(ln1 x)), then h + ln4(mlp(ln3 h)): Gemma 3 normalises inputs and outputs
        of sublayers."""
        mixed = self._mixed(mix(self.input_layernorm(x)), seeds)
        x = x + self._added(self.post_attention_layernorm(mixed), seeds.mixer)
        fed, routed = self._fed(self.pre_feedforward_layernorm(x), feed, seeds)
        return x + self._added(self.post_feedforward_layernorm(fed), seeds.feed_forward), routed

    def _parallel(self, x: Tensor, mix: Mix, feed: Feed, seeds: DropoutSeeds) -> tuple[Tensor, RoutingSums | None]:
        """Computes x + attn(ln1 x) + mlp(ln2 x), GPT-J's block; with gpt_j_tied the MLP also reads ln1 x.

        Without dropout, one all-reduce sums the row-parallel outputs of both attention and MLP.
        """
        normed, attended, fed = self.input_layernorm(x), self.attention.output, self.mlp.output
        mixed = mix(normed)
        seed = seeds.adapters
        inner, routed = feed(normed if self.one_norm else self.post_attention_layernorm(x))
        if self.training and self.hidden_dropout > 0.0:
            x = x + self._added(attended(mixed, seed), seeds.mixer)
            return x + self._added(fed(inner, seed), seeds.feed_forward), routed
        return x + self._added(row_parallel_sum((attended, fed), (mixed, inner), seed), None), routed


_RESIDUAL_FORMS = {
    "sequential": Block._sequential,
    "parallel": Block._parallel,
    "olmo3": Block._olmo3,
    "sandwich": Block._sandwich,
    "single": Block._single,
}


def kind_of(table: Sequence[type[Any]], spec: Any) -> Any:
    """Returns the class in `table` that the type of `spec` belongs to; None if `spec` is None."""
    return None if spec is None else next(kind for kind in table if isinstance(spec, kind.Spec))
