"""The decoder as a flat list of layers, and the stage that runs a contiguous part of it."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from megatron.data import Batch
from megatron.model.attention import (
    AttentionInputs,
    Backend,
    LayerKind,
    choose_backend,
    document_mask,
    layer_kind,
    takes_varlen,
    window_mask,
)
from megatron.model.block import Block
from megatron.model.branches import BranchBatch, branch_distances, visible
from megatron.model.cache import KVCache
from megatron.model.neftune import add_noise, document_lengths
from megatron.model.norms import build_norm
from megatron.model.positions import (
    RelativePositionBias,
    alibi_bias,
    rope_frequencies,
    rope_tables,
    sinusoidal_embedding,
)
from megatron.model.trainable import lowest_trained
from megatron.model.weight_map import layer_params
from megatron.mpu import (
    HeadInput,
    Linear,
    ParallelGroups,
    VocabParallelEmbedding,
    dropout,
    mix_seed,
    scatter_to_sequence,
)
from megatron.mpu.mappings import copy_to_tensor, gather_from_sequence
from megatron.neox_arguments import ConfigError, NeoXArgs


class Hidden(NamedTuple):
    """What travels between pipeline stages; later losses and masks can ride here.

    hidden_states: `[seq, batch, hidden]`, or this tensor rank's `[seq/T, batch, hidden]` under sequence parallelism.
    """

    hidden_states: Tensor


class Embedding(nn.Module):
    """Tokens (and learned or sinusoidal positions) to hidden states."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            args.padded_vocab_size, args.hidden_size, groups=groups, sequence_parallel=args.sequence_parallel
        )
        self.group = groups.group("tensor")
        self.sequence_parallel = args.sequence_parallel
        self.multiplier = args.embedding_multiplier
        self.sinusoidal = args.pos_emb == "sinusoidal"
        self.position_offset = args.opt_pos_emb_offset
        self.position_embeddings: nn.Embedding | None = None
        if args.pos_emb == "learned":
            self.position_embeddings = nn.Embedding(
                args.max_position_embeddings, args.hidden_size, device=groups.device, dtype=torch.float32
            )
        self.dropout = args.hidden_dropout
        self.noise = args.neftune_noise_alpha
        self.part, self.parts = (groups.rank("tensor"), groups.size("tensor")) if args.sequence_parallel else (0, 1)

    def forward(self, tokens: Tensor, positions: Tensor, seed: int, cu_seqlens: Tensor | None = None) -> Tensor:
        """`[batch, seq]` to `[seq, batch, hidden]` (`[seq/T]` under sequence parallelism); cu_seqlens: of `Batch`."""
        x = self.word_embeddings(tokens.t())
        cut = self.group if self.sequence_parallel else None
        if self.multiplier != 1.0:
            x = x * torch.tensor(self.multiplier, dtype=x.dtype)
        if self.noise and self.training:
            x = add_noise(x, document_lengths(tokens, cu_seqlens), self.noise, seed, self.part, self.parts)
        if self.position_embeddings is not None:
            added = self.position_embeddings(positions.t() + self.position_offset)
            x = x + scatter_to_sequence(added, cut)
        if self.sinusoidal:
            added = sinusoidal_embedding(positions.t(), x.shape[-1]).to(x.dtype)
            x = x + scatter_to_sequence(added, cut)
        return dropout(x, self.dropout, seed + self.part, self.training)


class Head(nn.Module):
    """Final projection to this rank's vocabulary, of `HeadInput`; parameter `final_linear.weight`."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__()
        self.group, self.sequence_parallel = groups.group("tensor"), args.sequence_parallel
        self.final_linear = Linear(
            args.hidden_size, args.padded_vocab_size, parallel="column", bias=False, groups=groups
        )
        self.final_linear.group = None  # what it gets has entered the tensor ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.final_linear(x)


class TiedHead(nn.Module):
    """Final projection with the embedding's weight: the embedding's own parameter where both are on one stage, else
    a copy whose gradient is summed with the first stage's."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.group, self.sequence_parallel = groups.group("tensor"), args.sequence_parallel
        self.word_embeddings = nn.Module()
        if weight is None:
            rows = args.padded_vocab_size // groups.size("tensor")
            weight = nn.Parameter(torch.empty(rows, args.hidden_size, device=groups.device, dtype=torch.float32))
            weight.tensor_model_parallel = groups.size("tensor") > 1  # type: ignore[attr-defined]
        self.word_embeddings.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.word_embeddings.weight)  # type: ignore[arg-type]


# What NeoX calls these layers, for `pipe_partition_method: type:REGEX`.
_NEOX_CLASSES = {
    "embedding": "embeddingpipe",
    "block": "paralleltransformerlayerpipe",
    "norm": "normpipe",
    "head": "parallellinearpipe",
}


@dataclass(frozen=True)
class LayerSpec:
    """One entry of the model's list: NeoX layer index and what is built there."""

    index: int
    kind: str  # embedding, block, norm or head


def layer_specs(args: NeoXArgs) -> tuple[LayerSpec, ...]:
    """The whole model as a list, in execution order."""
    last = args.num_layers + 1
    blocks = [LayerSpec(i, "block") for i in range(2, last + 1)]
    return (LayerSpec(0, "embedding"), *blocks, LayerSpec(last + 2, "norm"), LayerSpec(last + 3, "head"))


def _layer_weights(args: NeoXArgs, specs: tuple[LayerSpec, ...]) -> list[int]:
    """What `pipe_partition_method` balances, by layer."""
    method = args.pipe_partition_method.lower()
    if method == "uniform":
        return [1] * len(specs)
    if method == "parameters":
        sizes = {i: sum(math.prod(p.shape) for p in found) for i, found in layer_params(args).items()}
        return [sizes.get(spec.index, 0) for spec in specs]
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"))
        weights = [int(bool(pattern.search(_NEOX_CLASSES[spec.kind]))) for spec in specs]
        if any(weights):
            return weights
    raise ConfigError(
        [
            f"{args.origin('pipe_partition_method')}: pipe_partition_method: {args.pipe_partition_method}: expected "
            "uniform, parameters, or type:REGEX that finds a layer, as type:transformer|mlp"
        ]
    )


def partition_layers(args: NeoXArgs, stages: int) -> list[tuple[LayerSpec, ...]]:
    """Cut the list into contiguous stages whose largest weight is smallest, then whose smallest is largest; what is
    left over goes to earlier stages, so equal blocks fall as in DeepSpeed's `partition_balanced`.

    Every stage has a block, whatever the weights: all stages must own the same parameter groups.
    """
    specs = layer_specs(args)
    weight = [0, *accumulate(_layer_weights(args, specs))]
    blocks = [0, *accumulate(spec.kind == "block" for spec in specs)]
    # By number of layers cut so far: (largest, -smallest weight of a stage, bounds of the stages).
    cuts: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0, -math.inf, (0,))}
    for _ in range(stages):
        ways = [
            (max(largest, weight[stop] - weight[start]), max(smallest, weight[start] - weight[stop]), (*bounds, stop))
            for start, (largest, smallest, bounds) in cuts.items()
            for stop in range(start + 1, len(specs) + 1)
            if blocks[stop] > blocks[start]
        ]
        cuts = {}
        for way in sorted(ways, key=lambda way: (way[0], way[1], -way[2][-2])):
            cuts.setdefault(way[2][-1], way)
    bounds = cuts[len(specs)][2]
    return [specs[start:stop] for start, stop in pairwise(bounds)]


class Stage(nn.Module):
    """A contiguous part of the decoder: the whole of it without pipeline parallelism.

    Parameters are named `layers.<NeoX index>.<NeoX name>`.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, specs: tuple[LayerSpec, ...], backend: Backend) -> None:
        super().__init__()
        self.specs = specs
        self.args = args
        self.device_of_groups = groups.device
        size = groups.size("tensor")
        self.local_heads = args.num_attention_heads // size
        self.first_head = self.local_heads * groups.rank("tensor")
        # 0 off, otherwise the number of blocks recomputed together.
        self.recompute = args.checkpoint_num_layers if args.checkpoint_activations else 0
        self.lowest_trained = lowest_trained(args)
        layers: dict[str, nn.Module] = {}
        for spec in specs:
            layers[str(spec.index)] = self._build(spec, groups, backend, layers)
        self.layers = nn.ModuleDict(layers)
        if args.pos_emb == "rpe":
            # One table, which every block holds under NeoX's name; pipeline stages sum its gradient.
            bias = RelativePositionBias(args, groups)
            for spec in specs:
                if spec.kind == "block":
                    self.layers[str(spec.index)].attention.rpe = bias  # type: ignore[union-attr]

    def _build(
        self, spec: LayerSpec, groups: ParallelGroups, backend: Backend, built: dict[str, nn.Module]
    ) -> nn.Module:
        if spec.kind == "embedding":
            return Embedding(self.args, groups)
        if spec.kind == "block":
            block = Block(self.args, groups, backend)
            if self.args.compile == "block":
                block.compile()
            return block
        if spec.kind == "norm":
            norm = nn.Module()
            norm.norm = build_norm(self.args, groups)
            return norm
        if self.args.no_weight_tying:
            return Head(self.args, groups)
        embedding = built.get("0")
        return TiedHead(self.args, groups, embedding.word_embeddings.weight if embedding else None)  # type: ignore[union-attr,arg-type]

    def empty_cache(self, blocks: int, block_size: int) -> KVCache:
        """So many blocks of `block_size` tokens each, in the dtype of the weights."""
        layers, kv_heads = self._cached
        dtype = next(self.parameters()).dtype
        return KVCache.empty(layers, (blocks, block_size, kv_heads, self.args.head_dim), dtype, self.device_of_groups)

    @property
    def cache_bytes(self) -> int:
        """That one token takes in a cache on this rank."""
        layers, kv_heads = self._cached
        return 2 * len(layers) * kv_heads * self.args.head_dim * next(self.parameters()).dtype.itemsize

    @property
    def _cached(self) -> tuple[list[int], int]:
        """Blocks, and key-value heads of each."""
        kv_heads = self.args.kv_heads * self.local_heads // self.args.num_attention_heads
        return [spec.index for spec in self.specs if spec.kind == "block"], kv_heads

    def _attention_inputs(
        self,
        batch: Batch,
        positions: Tensor,
        cache: KVCache | None = None,
        last: Tensor | None = None,
        kind: LayerKind | None = None,
    ) -> AttentionInputs:
        """Of the blocks of one kind; None: that of the first block."""
        args, (rows, seq), device = self.args, batch.tokens.shape, batch.tokens.device
        kind = kind or layer_kind(args, 2)
        rope = mask = cu_seqlens = columns = None
        if kind.rotary:
            length = seq if last is None else (last + 1).unsqueeze(1)
            rope = rope_tables(positions, *rope_frequencies(args, length, device, kind.local))
        if cache is not None and batch.positions is not None:
            columns, seq = positions, cache.length
        window, documents = kind.window, batch.cu_seqlens
        if columns is None and (documents is not None or window) and takes_varlen(args, self.device_of_groups, window):
            offsets = torch.arange(0, (rows + 1) * seq, seq, device=device, dtype=torch.int32)
            cu_seqlens = offsets if documents is None else (documents + offsets[:-1].unsqueeze(1)).flatten()
            return AttentionInputs(rope, None, cu_seqlens, -1 if window is None else window)
        if documents is not None:
            mask = document_mask(documents, seq)
        if window is not None or columns is not None:
            near = window_mask(seq, window, device, columns)
            mask = near if mask is None else mask & near
        bias = self._bias(seq, device, columns)
        if bias is not None:
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        elif columns is not None and mask is not None:  # else every block would make its own of it
            hidden = torch.zeros_like(mask, dtype=next(self.parameters()).dtype)
            mask = hidden.masked_fill_(~mask, float("-inf"))
        return AttentionInputs(rope, mask, columns=columns)

    def _branch_inputs(self, batch: BranchBatch, kind: LayerKind) -> AttentionInputs:
        """Of a batch with branches."""
        assert batch.branches is not None and batch.positions is not None
        device, positions, rope = batch.tokens.device, batch.positions, None
        if kind.rotary:
            length = positions.amax(1, keepdim=True) + 1
            rope = rope_tables(positions, *rope_frequencies(self.args, length, device, kind.local))
        distance, mask = branch_distances(positions), visible(batch.branches)
        if kind.window is not None:
            mask = mask & (distance >= -kind.window)
        bias = self._bias(batch.tokens.shape[1], device, None, distance)
        return AttentionInputs(rope, mask if bias is None else bias.masked_fill(~mask, float("-inf")))

    def _bias(
        self, seq: int, device: torch.device, columns: Tensor | None, distance: Tensor | None = None
    ) -> Tensor | None:
        if self.args.pos_emb == "alibi":
            heads = self.args.num_attention_heads, self.first_head, self.local_heads
            return alibi_bias(seq, *heads, device, columns, distance)
        if self.args.pos_emb == "rpe":
            first = next(spec for spec in self.specs if spec.kind == "block")
            return self.layers[str(first.index)].attention.rpe(seq, columns, distance)  # type: ignore[union-attr,operator]
        return None

    def _run_blocks(
        self,
        specs: list[LayerSpec],
        x: Tensor,
        inputs: Mapping[LayerKind, AttentionInputs],
        seed: int,
        cache: KVCache | None,
    ) -> Tensor:
        dropping = self.training and (self.args.hidden_dropout > 0.0 or self.args.attention_dropout > 0.0)

        def run(x: Tensor, first: int, last: int) -> Tensor:
            for spec in specs[first:last]:
                seeds = tuple(mix_seed(seed, spec.index, i) if dropping else 0 for i in range(3))
                own = inputs[layer_kind(self.args, spec.index)]
                x = self.layers[str(spec.index)](x, own, seeds, cache.layers[spec.index] if cache else None)
            return x

        frozen = sum(spec.index < self.lowest_trained for spec in specs)
        with torch.no_grad():
            x = run(x, 0, frozen)
        if not self.recompute or not torch.is_grad_enabled():
            return run(x, frozen, len(specs))
        on_gpu = self.device_of_groups.type == "cuda"
        with save_on_cpu(pin_memory=on_gpu) if self.args.checkpoint_in_cpu else nullcontext():
            for first in range(frozen, len(specs), self.recompute):
                # Masks of dropout are functions of their seeds, so no generator state need be kept.
                x = checkpoint(run, x, first, first + self.recompute, use_reentrant=False, preserve_rng_state=False)
        return x

    def forward(
        self,
        hidden: Hidden | None,
        batch: Batch,
        finish: Callable[[HeadInput], Tensor] = HeadInput.logits,
        cache: KVCache | None = None,
        last: Tensor | None = None,
        every: bool = False,
    ) -> Hidden | Tensor:
        """One micro-batch through this stage.

        hidden: from the stage before, None on the first. Returns `Hidden`, or on the last stage what `finish` makes of
        it, as the logits `[seq, batch, vocab/T]` are. It is called in here because ZeRO 3 has weights only here.

        For generation, without sequence parallelism, documents and gradients: cache, filled by a batch without
        positions (rows padded on the right) and continued by batches that have them; last: `[batch]` indices of the
        rows' last tokens, whose logits alone come, as `[1, batch, vocab/T]`, unless those of every token are wanted.

        For scoring, a `BranchBatch`.
        """
        if cache is not None or last is not None:
            assert not self.args.sequence_parallel and batch.cu_seqlens is None
        positions = batch.positions
        if positions is None:
            seq = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
            positions = seq.unsqueeze(0).expand_as(batch.tokens)
        blocks = [spec for spec in self.specs if spec.kind == "block"]
        if self.specs[0].kind == "embedding":
            with nullcontext() if self.lowest_trained == 0 else torch.no_grad():
                seed = mix_seed(batch.seed, "embedding")
                x = self.layers["0"](batch.tokens, positions, seed, batch.cu_seqlens)
        else:
            assert hidden is not None, "a later stage needs the hidden states of the stage before"
            x = hidden.hidden_states
            if self.specs[0].index <= self.lowest_trained:
                x = x.detach()  # a pipeline's input asks for a gradient
        kinds = dict.fromkeys(layer_kind(self.args, spec.index) for spec in blocks)
        scoring = batch if isinstance(batch, BranchBatch) else None
        if scoring is not None and scoring.branches is not None:
            inputs = {kind: self._branch_inputs(scoring, kind) for kind in kinds}
        else:
            inputs = {kind: self._attention_inputs(batch, positions, cache, last, kind) for kind in kinds}
        x = self._run_blocks(blocks, x, inputs, batch.seed, cache)
        if self.specs[-1].kind != "head":
            return Hidden(x)
        if last is not None and not every:
            x = x[last, torch.arange(len(last), device=x.device)].unsqueeze(0)
        if scoring is not None and scoring.wanted is not None:
            x = x.transpose(0, 1).flatten(0, 1)[scoring.wanted].unsqueeze(1)
        norm, head = (self.layers[str(spec.index)] for spec in self.specs[-2:])
        enter = gather_from_sequence if head.sequence_parallel else copy_to_tensor
        return finish(HeadInput(enter(norm.norm(x), head.group), head))  # type: ignore[operator,arg-type]


def _check_compiler(args: NeoXArgs, device: torch.device) -> None:
    # torch.compile would only say so in the first step. On a GPU it is Triton that compiles its launchers.
    names = [os.environ.get("CXX", "g++")] if device.type == "cpu" else [os.environ.get("CC", "gcc"), "clang"]
    if not any(shutil.which(name) for name in names):
        place = args.origin("compile")
        raise ConfigError(
            [f"{place}: compile: {args.compile} needs {' or '.join(names)}, not found on the PATH; set compile: false"]
        )


def build_stage(args: NeoXArgs, groups: ParallelGroups, log: Callable[[str], None] | None = None) -> Stage:
    """This rank's stage in fp32, memory only: `init_stage` or a checkpoint gives the values."""
    backend = choose_backend(args, groups.device)
    if log is not None and args.attention_backend != backend.name:
        log(f"attention_backend: {args.attention_backend} chose {backend.name}")
    if args.compile:
        _check_compiler(args, groups.device)
    specs = partition_layers(args, groups.size("pipe"))[groups.rank("pipe")]
    return Stage(args, groups, specs, backend)
