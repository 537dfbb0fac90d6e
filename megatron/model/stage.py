"""The layers of one pipeline rank, and how a micro-batch runs through them."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.data import Batch
from megatron.data.future_tokens import future_tokens
from megatron.model.attention import (
    AttentionBackends,
    AttentionInputs,
    HeadAttention,
    HeadsOrder,
    SelfAttention,
    cached_inputs,
    choose_backends,
    text_inputs,
    tree_inputs,
)
from megatron.model.block import MIXERS, Block, DropoutSeeds, kind_of
from megatron.model.cache import KVCache, StateShapes
from megatron.model.embedding import Embedding
from megatron.model.head import FinalNorm, Head, ScoreHead, TiedHead
from megatron.model.mamba import (
    ScanKernels,
    StateInputs,
    choose_scans,
    shared_row_inputs,
    state_inputs,
    with_delta_rules,
)
from megatron.model.moe import Balance, MoE, RoutingSums
from megatron.model.pipeline_partition import StagePlacement, partition_layers
from megatron.model.positions import RelativePositionBias, alibi_bias, alibi_slopes
from megatron.model.prediction import PredictionBlock
from megatron.model.specs import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    FinalNormSpec,
    GatedDeltaNetSpec,
    HeadSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MoESpec,
    PredictionSpec,
    RelativeSpec,
    ScoreSpec,
    StateMixerSpec,
)
from megatron.model.trainable import lowest_trained
from megatron.model.weight_map import block_specs
from megatron.mpu import (
    ContextRank,
    HeadInput,
    Linear,
    ParallelGroups,
    copy_to_tensor,
    gather_from_sequence,
    mix_seed,
)
from megatron.mpu.deferred import DeferredGradients
from megatron.mpu.fp8 import DelayedScaling
from megatron.neox_arguments import NeoXArgs

Ran = tuple[Tensor, tuple[RoutingSums, ...]]
"""The hidden states after some blocks, and the `RoutingSums` of each router in these blocks."""
RunBlocks = Callable[[Callable[[Tensor, int, int], Ran], Tensor, int, int], Ran]


class HiddenStates(NamedTuple):
    """The tensor that one pipeline stage sends to the next.

    hidden_states: `[seq, batch, hidden]`, or this tensor rank's `[seq/T, batch, hidden]` under sequence
        parallelism.
    """

    hidden_states: Tensor


@dataclass(frozen=True, eq=False)
class InferenceContext:
    """The inputs of a forward pass without gradients, besides its batch. Training has none.

    cache: a batch without positions fills it (rows are padded on the right); a batch with positions continues
        the texts in it.
    last_tokens: `[batch]` int64, the index of the last token of each row, if rows are padded.
    branch_ids: `[batch, seq]` int64, for tree attention: 0 for the context of a row, 1, 2, .. for its
        continuations. A token sees earlier tokens of the context and of its own branch. Each branch continues
        the context's positions.
    logit_positions: `[n]` int64, row * seq + column of the tokens whose logits are computed, which are then
        `[n, 1, vocab/T]`; None: all tokens.
    text_lengths: `[batch]` int64, number of tokens of the full text that each row is a part of, for rotary
        frequencies that depend on it; None: texts end with the last token of each row.
    """

    cache: KVCache | None = None
    last_tokens: Tensor | None = None
    branch_ids: Tensor | None = None
    logit_positions: Tensor | None = None
    text_lengths: Tensor | None = None


class Stage(nn.Module):
    """The layers of one pipeline rank: of one stage, or of several with virtual stages.

    Each stage is a chunk: consecutive layers. Without pipeline parallelism one chunk is the full decoder.
    Parameters are named `layers.<NeoX index>.<NeoX name>`. They are on the meta device until `materialize`.
    Blocks of multi-token prediction are on the last stage, which then has a copy of the embedding layer. They
    run in training only.

    chunks: the layers of each of this rank's stages, in the order of the model. specs: all of them.
    blocks: the specs of its blocks, also of multi-token prediction. predictions: of the latter alone.
    run_blocks: runs the blocks that need gradients. It calls a function of (x, first block, end block) for
        consecutive ranges of blocks; `training.recompute` sets one that saves fewer activations.
    compiled: whether the blocks are compiled.
    dtype: of the weights that blocks compute with, and of hidden states.
    backends: the attention backends by `AttentionSpec.backend`.
    scans: the kernels of Mamba's mixers.
    delayed_scaling: the state of FP8 products with delayed scaling; None without it.
    balance: load balancing of experts, used in training; None if the model has no experts.
    deferred: takes weight gradients that the pipeline schedule computes later; None: no schedule does.
    """

    delayed_scaling: DelayedScaling | None = None
    balance: Balance | None = None
    deferred: DeferredGradients | None = None
    run_blocks: RunBlocks
    compiled = False
    dtype = torch.float32

    def __init__(
        self,
        chunks: tuple[tuple[LayerSpec, ...], ...],
        groups: ParallelGroups,
        backends: Mapping[str, AttentionBackends],
        scans: ScanKernels,
        *,
        sequence_parallel: bool = False,
        lowest_trained: int = 0,
    ) -> None:
        super().__init__()
        self.chunks, self.specs = chunks, tuple(spec for chunk in chunks for spec in chunk)
        self.blocks = [spec for spec in self.specs if isinstance(spec, BlockSpec)]
        self.predictions = [spec for spec in self.specs if isinstance(spec, PredictionSpec)]
        self.device_of_groups, self.context_group = groups.device, groups.group("context")
        self.context_rank, self.context_size = groups.rank("context"), groups.size("context")
        self.tensor_rank, self.tensor_size = groups.rank("tensor"), groups.size("tensor")
        self.lowest_trained, self.backends, self.scans = lowest_trained, backends, scans
        self.run_blocks = _run_at_once
        self.drops = any(spec.dropout > 0.0 for spec in self.blocks)
        self.drops |= any(spec.dropout > 0.0 for spec in self.attention.values())
        feeds = [spec.feed_forward for spec in self.blocks]
        self.drops |= any(isinstance(feed, MoESpec) and feed.router.jitter > 0.0 for feed in feeds)
        self.drops_tokens = any(isinstance(feed, MoESpec) and feed.capacity_factor is not None for feed in feeds)
        self._slopes: dict[int, Tensor] = {}  # by number of heads
        self.layers = nn.ModuleDict()
        # `materialize` allocates memory later, one layer after another, in the dtype of the run.
        unallocated = replace(groups, device=torch.device("meta"))
        if self.predictions and not any(isinstance(spec, EmbeddingSpec) for spec in self.specs):
            self.layers["0"] = self._build(self.predictions[0].embedding, unallocated, sequence_parallel)
        for spec in self.specs:
            self.layers[str(spec.index)] = self._build(spec, unallocated, sequence_parallel)
        self._share_relative_biases(unallocated)
        adapters = [module.adapters for module in self.modules() if isinstance(module, Linear)]
        self.drops |= any(adapter is not None and adapter.lora.dropout > 0.0 for adapter in adapters)

    def _build(self, spec: LayerSpec, groups: ParallelGroups, sequence_parallel: bool) -> nn.Module:
        match spec:
            case EmbeddingSpec():
                return Embedding(spec, groups, sequence_parallel)
            case BlockSpec():
                attention = self.attention.get(spec.index)
                backends = self.scans if attention is None else self.backends.get(attention.backend)
                kind: type[Any] = PredictionBlock if isinstance(spec, PredictionSpec) else Block
                return kind(spec, groups, sequence_parallel, backends=backends)
            case FinalNormSpec():
                return FinalNorm(spec, groups, sequence_parallel)
            case HeadSpec(tied=False):
                return Head(spec, groups, sequence_parallel)
            case ScoreSpec():
                return ScoreHead(spec, groups, sequence_parallel)
        embedding = self.layers["0"] if "0" in self.layers else None
        words = embedding.word_embeddings if isinstance(embedding, Embedding) else None
        return TiedHead(spec, groups, sequence_parallel, words)

    def _share_relative_biases(self, groups: ParallelGroups) -> None:
        """Gives every attention block the same table of relative position biases, under NeoX's name.

        Pipeline stages sum the gradients of their copies.
        """
        tables: dict[RelativeSpec, RelativePositionBias] = {}
        for layer, spec in self.attention.items():
            relative, attention = spec.relative, self.layers[str(layer)].attention
            if relative is not None and isinstance(attention, SelfAttention):
                if relative not in tables:
                    tables[relative] = RelativePositionBias(relative, groups)
                attention.rpe = tables[relative]

    @property
    def attention(self) -> dict[int, AttentionSpec]:
        """The attention specs of this stage's blocks, by NeoX layer index; blocks without attention are left
        out."""
        return {spec.index: spec.mixer for spec in self.blocks if isinstance(spec.mixer, AttentionSpec)}

    @property
    def state_blocks(self) -> list[BlockSpec]:
        """The blocks of this stage whose mixer has a state (Mamba, Mamba 2, Gated DeltaNet)."""
        return [spec for spec in self.blocks if isinstance(spec.mixer, StateMixerSpec)]

    # -- caches ----------------------------------------------------------------------------------------------

    def empty_cache(self, blocks: int, block_size: int, texts: int = 0) -> KVCache:
        """Returns a cache for generation, with `blocks` blocks of `block_size` tokens, and the states of
        `texts` texts.

        Keys and values have the dtype of the weights.
        """
        device = self.device_of_groups
        return KVCache.empty(self._cached, blocks, block_size, self.dtype, device, self._states, texts)

    @property
    def cache_bytes(self) -> int:
        """The number of bytes that one token takes in this rank's key-value cache."""
        return sum(math.prod(shape) for shapes in self._cached.values() for shape in shapes) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """The number of bytes that the Mamba states of one text take on this rank."""
        sizes = [
            math.prod(shapes.last_inputs) * self.dtype.itemsize + math.prod(shapes.state) * shapes.state_dtype.itemsize
            for shapes in self._states.values()
        ]
        return sum(sizes)

    @property
    def _states(self) -> dict[int, StateShapes]:
        """The shapes of the state that this rank keeps of each text, by NeoX layer index."""
        mixers = {spec.index: spec.mixer for spec in self.state_blocks if spec not in self.predictions}
        return {
            i: kind_of(MIXERS, mixer).state_shapes(mixer, self.tensor_size, self.dtype) for i, mixer in mixers.items()
        }

    @property
    def _cached(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The shapes of what this rank caches of a token, by NeoX layer index (`KVCache.empty`)."""
        size, unused = self.tensor_size, {spec.index for spec in self.predictions}
        mixers = {layer: spec for layer, spec in self.attention.items() if layer not in unused}
        return {layer: kind_of(MIXERS, spec).cache_shapes(spec, size) for layer, spec in mixers.items()}

    # -- inputs of blocks ------------------------------------------------------------------------------------

    def attention_inputs(
        self, layer: int, batch: Batch, positions: Tensor, context: InferenceContext
    ) -> AttentionInputs:
        """Returns the attention inputs of the block with NeoX layer index `layer`.

        All blocks with equal `AttentionSpec.inputs` share them.

        positions: `[batch, seq]`, of the columns that this context rank computes.
        """
        exchanges = batch.context is not None and batch.context.heads is not None
        attention = self.layers[str(layer)].attention
        heads = attention.own_heads if exchanges and isinstance(attention, HeadAttention) else None
        mixer, cache, bias = self.attention[layer], context.cache, partial(self._bias, layer, heads)
        if context.branch_ids is not None:
            branches, length = context.branch_ids, positions.amax(1, keepdim=True) + 1
            # A mask, because rows have many lengths: a block mask would be compiled for each of them.
            return tree_inputs(mixer, positions, branches, torch.zeros_like(branches), length, None, bias)
        if cache is not None and batch.positions is not None:
            return cached_inputs(mixer, positions, context.text_lengths, cache.length, self.dtype, bias)
        form = self.backends[mixer.backend].form(batch, mixer.window)
        lengths, context_rank = context.text_lengths, self._context_rank(batch)
        if lengths is None and context.last_tokens is not None:
            lengths = context.last_tokens + 1
        inputs = text_inputs(mixer, batch, positions, lengths, form, bias, context_rank)
        if batch.context is not None and batch.context.heads is not None:
            inputs = inputs._replace(heads=HeadsOrder(batch.context.heads.order, batch.context.heads.places))
        if isinstance(attention, HeadAttention) and attention.logit_watch is not None:
            inputs = inputs._replace(filled=batch.filled)
        if self.compiled and inputs.cu_seqlens is not None and inputs.longest is not None:
            shared_prefixes, keys = (inputs.written_out,), (inputs.key_index, *(inputs.runs or ()))
            for sized in (inputs.cu_seqlens, inputs.longest, *shared_prefixes, *keys):
                if sized is not None:
                    torch._dynamo.maybe_mark_dynamic(sized, 0)  # documents differ from batch to batch
        return inputs

    def _context_rank(self, batch: Batch) -> ContextRank | None:
        """Returns the columns of the batch that this context rank computes; None: all."""
        part = batch.context
        if part is None or self.context_group is None:
            return None
        return ContextRank(self.context_group, part.columns, part.order, part.token_mask, part.loss_places)

    def _bias(
        self, layer: int, heads: slice | None, seq: int, columns: Tensor | None, distance: Tensor | None
    ) -> Tensor | None:
        """heads: of this tensor rank, those to which this rank attends; None: all."""
        spec = self.attention[layer]
        if spec.alibi:
            slopes = self._slopes_of(spec.heads)
            return alibi_bias(seq, slopes if heads is None else slopes[heads], columns, distance)
        if spec.relative is not None:
            return self.layers[str(layer)].attention.rpe(seq, columns, distance, heads)  # type: ignore[union-attr,operator]
        return None

    def _slopes_of(self, heads: int) -> Tensor:
        """Returns ALiBi's slopes of this rank's heads, `[heads/T]`. heads: number of heads over all tensor
        ranks.

        They are cached on the device, because copying them makes the host wait.
        """
        if heads not in self._slopes:
            local = heads // self.tensor_size
            slopes = alibi_slopes(heads)[local * self.tensor_rank :][:local]
            self._slopes[heads] = torch.tensor(slopes, device=self.device_of_groups)
        return self._slopes[heads]

    # -- forward ---------------------------------------------------------------------------------------------

    def _run_blocks(
        self,
        specs: Sequence[BlockSpec],
        x: Tensor,
        inputs: Mapping[int, AttentionInputs | StateInputs],
        batch: Batch,
        cache: KVCache | None,
        token_mask: Tensor | None,
    ) -> Ran:
        """Runs blocks on `x`. token_mask: `[places, batch]` boolean, False where experts take no token."""
        dropping = self.training and self.drops

        def run(x: Tensor, start: int, end: int) -> Ran:
            routed: list[RoutingSums] = []
            for spec in specs[start:end]:
                layer, block = spec.index, self.layers[str(spec.index)]
                seeds = block.seeds(batch.seed, layer) if dropping else DropoutSeeds()  # type: ignore[operator]
                x, sums = block(x, inputs.get(layer), seeds, cache.layers.get(layer) if cache else None, token_mask)
                routed += [sums] if sums is not None else []
            return x, tuple(routed)

        frozen = sum(spec.index < self.lowest_trained for spec in specs)
        with torch.no_grad():
            x, frozen_sums = run(x, 0, frozen)
        x, routed = (self.run_blocks if torch.is_grad_enabled() else _run_at_once)(run, x, frozen, len(specs))
        return x, frozen_sums + routed

    def forward(
        self,
        hidden: HiddenStates | None,
        batch: Batch,
        finish: Callable[[HeadInput], Tensor] = HeadInput.logits,
        chunk: int = 0,
        context: InferenceContext | None = None,
    ) -> HiddenStates | Tensor:
        """Runs one micro-batch through one chunk. Returns `HiddenStates`, or on the last stage the result of
        `finish`.

        hidden: the output of the previous stage; None on the first stage.
        finish: called with the last stage's `HeadInput` within the forward pass, because with ZeRO 3 the
            weights are available only there. By default it returns the logits `[seq, batch, vocab/T]`.
        chunk: index of the chunk in `chunks`.
        context: inputs of a forward pass without gradients. With a cache or padded rows, the batch must have
            no document boundaries.
        """
        inference, specs = context or InferenceContext(), self.chunks[chunk]
        predictions = [spec for spec in specs if isinstance(spec, PredictionSpec) and context is None and self.training]
        blocks = [spec for spec in specs if isinstance(spec, BlockSpec) and not isinstance(spec, PredictionSpec)]
        assert batch.documents is None or (inference.cache is None and inference.last_tokens is None)
        positions, starts = batch.positions, None if batch.documents is None else batch.documents.cu_seqlens
        context_rank = self._context_rank(batch)
        if positions is None:
            seq = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
            positions = seq.unsqueeze(0).expand_as(batch.tokens)
        if context_rank is not None:
            positions = positions.index_select(1, context_rank.columns)
        if specs[0].kind == "embedding":
            with nullcontext() if self.lowest_trained == 0 else torch.no_grad():
                x = self.layers["0"](batch.tokens, positions, mix_seed(batch.seed, "embedding"), starts, context_rank)
        else:
            assert hidden is not None, "a pipeline stage after the first needs the previous stage's hidden states"
            x = hidden.hidden_states
            if specs[0].index <= self.lowest_trained:
                x = x.detach()  # the pipeline's input requires a gradient, but no layer below here is trained
        inputs_by_spec: dict[object, AttentionInputs] = {}
        inputs: dict[int, AttentionInputs | StateInputs] = {}
        attention = self.attention
        running = [*blocks, *predictions]
        for layer, mixer in ((spec.index, attention[spec.index]) for spec in running if spec.index in attention):
            if mixer.inputs not in inputs_by_spec:
                inputs_by_spec[mixer.inputs] = self.attention_inputs(layer, batch, positions, inference)
            inputs[layer] = inputs_by_spec[mixer.inputs]
        if state_blocks := [spec for spec in self.state_blocks if spec in running]:
            shares_prefixes = batch.documents is not None and batch.documents.prefixes is not None
            assert inference.branch_ids is None and not shares_prefixes, (
                "blocks with states support no trees or shared prefixes"
            )
            if batch.context is None:
                states = state_inputs(batch, inference.last_tokens, inference.cache is not None)
            else:
                tail = max(getattr(spec.mixer, "conv_kernel", 1) for spec in state_blocks) - 1
                states = shared_row_inputs(batch, self.context_size, self.context_rank, tail)
            inputs |= {spec.index: states for spec in state_blocks}
        # Padding must not use up the capacity of experts.
        masked = self.balance is not None and (self.training or self.drops_tokens)
        token_mask = batch.filled_places() if masked else None
        x, routed = self._run_blocks(blocks, x, inputs, batch, inference.cache, token_mask)
        if self.balance is not None and self.training:
            x = self.balance.attach(x, routed, [spec.index for spec in blocks], context_rank)
        if specs[-1].kind not in ("head", "score"):
            return HiddenStates(x)
        if inference.logit_positions is not None:
            seq_length = batch.tokens.shape[1]
            rows, columns = inference.logit_positions // seq_length, inference.logit_positions % seq_length
            x = x[columns, rows].unsqueeze(1)
        norm = next(self.layers[str(spec.index)] for spec in specs if isinstance(spec, FinalNormSpec))
        head, x = self.layers[str(specs[-1].index)], norm(x)
        enter = gather_from_sequence if head.sequence_parallel else copy_to_tensor
        hidden_states = [x, *self._predict(x, predictions, batch, inputs, context_rank)]
        final, *further = (enter(states, head.group) for states in hidden_states)  # type: ignore[arg-type]
        return finish(HeadInput(final, head, context_rank, tuple(further)))

    def _predict(
        self,
        x: Tensor,
        specs: Sequence[PredictionSpec],
        batch: Batch,
        inputs: Mapping[int, AttentionInputs | StateInputs],
        context: ContextRank | None,
    ) -> list[Tensor]:
        """Runs the blocks of multi-token prediction; returns the output of each, of the shape of `x`.

        x: output of the final norm. context: the columns that this context rank computes; None: all.
        """
        outputs: list[Tensor] = []
        starts = None if batch.documents is None else batch.documents.cu_seqlens
        for depth, spec in enumerate(specs, start=1):
            future = future_tokens(batch, depth)
            positions, token_mask, seed = future.positions, None, mix_seed(batch.seed, "embedding", depth)
            if self.balance is not None:
                token_mask = future.in_document.t()
            if context is not None:
                positions = positions.index_select(1, context.columns)
                token_mask = None if token_mask is None else context.local_weights(token_mask)
            with nullcontext() if self.lowest_trained == 0 else torch.no_grad():
                embedded = self.layers["0"](future.tokens, positions, seed, starts, context)
            joined = torch.cat([embedded, outputs[-1] if outputs else x], -1)
            hidden, routed = self._run_blocks([spec], joined, inputs, batch, None, token_mask)
            if self.balance is not None:
                hidden = self.balance.attach(hidden, routed, [spec.index], context)
            outputs.append(hidden)
        return outputs


def _run_at_once(run: Callable[[Tensor, int, int], Ran], x: Tensor, start: int, end: int) -> Ran:
    return run(x, start, end)


def build_stage(args: NeoXArgs, groups: ParallelGroups, log: Callable[[str], None] | None = None) -> Stage:
    """Returns this rank's pipeline stage on the meta device, where parameters have shapes but no memory.

    It chooses the attention backends and Mamba kernels. Then `init_stage` allocates and initialises the
    parameters, or `materialize` only allocates them.
    """
    mixers = [block.mixer for block in block_specs(args)]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    with_scans = [mixer for mixer in mixers if isinstance(mixer, MambaSpec | Mamba2Spec)]
    backends = choose_backends(args, groups.device, attention, log) if attention else {}
    scans = choose_scans(args, groups.device, with_scans, log) if with_scans else ScanKernels()
    scans = with_delta_rules(scans, args, [mixer for mixer in mixers if isinstance(mixer, GatedDeltaNetSpec)], log)
    if log is not None and args.context_parallel_type == "ring" and groups.size("context_keys") > 1:
        gather = sum(not spec.fits_ring for spec in attention)
        reason = "; windows, biases, caps, sinks, dropout and other backends than flash need it" if gather else ""
        log(f"context_parallel_type: ring; {gather} of {len(attention)} blocks with attention gather keys{reason}")
    placement = StagePlacement.configured(args, groups.size("pipe"))
    stages = partition_layers(args, placement.stages)
    chunks = tuple(stages[number] for number in placement.stages_of(groups.rank("pipe")))
    stage = Stage(
        chunks, groups, backends, scans, sequence_parallel=args.sequence_parallel, lowest_trained=lowest_trained(args)
    )  # fmt: skip
    if any(args.has_experts(block) for block in range(args.num_layers)):
        feeds = {spec.index: getattr(stage.layers[str(spec.index)], "mlp", None) for spec in stage.blocks}
        routers = {layer: feed.router for layer, feed in feeds.items() if isinstance(feed, MoE)}
        stage.balance = Balance(args, routers, groups.device)
    return stage
