"""Runs forward passes over rows of texts, and samples the next token of each row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.generation.batching.captured_decode import CapturedDecode, DecodeRows
from megatron.generation.batching.requests import Logprob
from megatron.generation.batching.sequence import SequenceState
from megatron.generation.sampling import TokenSampler
from megatron.model import HiddenStates, InferenceContext, KVCache, Model, forward_only
from megatron.mpu import HeadInput, gather_from_tensor


@dataclass(frozen=True)
class Forward:
    """The inputs of one forward pass that computes the next token of several rows, which are padded on the
    right.

    tokens: `[rows, seq]` int64, token ids.
    positions: `[rows, seq]`, the position of each token in its text; None: every row begins at position 0.
    last: `[rows]`, the column of the last token of each row.
    cache: the KV cache as these rows use it; None: no cache.
    sampler, uniforms: the sampler that chooses the next tokens, and its random numbers
        (`TokenSampler.sample`).
    top: number of most likely tokens to report; None: report no log-probabilities.
    targets: `[rows, seq]`, for each column a token whose log-probability to report; None: report none of
        them.
    adapters: `[rows]` int64, `Request.adapter` of each row; None: no adapters.
    lengths: `[rows]` int64, number of tokens of each row's full text, if `tokens` may hold only a part of it;
        None: `tokens` hold each text up to its end.
    divisors: `[rows]` fp32, temperatures that divide logits before the log-probabilities of chosen tokens are
        computed; None: 1.
    captured: replays a CUDA graph and returns the logits, `[rows, 1, vocab]`; None: the stage runs without a
        graph.
    """

    tokens: Tensor
    positions: Tensor | None
    last: Tensor
    cache: KVCache | None
    sampler: TokenSampler
    uniforms: Sequence[float]
    top: int | None = None
    targets: Tensor | None = None
    adapters: Tensor | None = None
    lengths: Tensor | None = None
    divisors: Tensor | None = None
    captured: Callable[[], Tensor] | None = None

    @property
    def width(self) -> int:
        """The number of values reported per row: the chosen token and, with `top`, log-probabilities.

        With `top`, the chosen token and each target add 1 + 2 `top` values: the token's log-probability, the
        ids of the `top` most likely tokens, and their log-probabilities.
        """
        reported = 0 if self.targets is None else self.targets.shape[1]
        return 1 + (0 if self.top is None else (1 + reported) * (1 + 2 * self.top))


@dataclass(frozen=True)
class RowOutput:
    """The result of a forward pass for one row.

    token: the chosen token, -1 if logits are NaN.
    logprob: the log-probability of the chosen token; None if not requested.
    targets: for each column, padding included, the log-probability of the column's token in
        `Forward.targets`.
    """

    token: int
    logprob: Logprob | None = None
    targets: Sequence[Logprob] = ()


@dataclass(frozen=True, eq=False)
class _ForwardBatch(Batch):
    """The batch of a forward pass. forward: the pass, always set."""

    forward: Forward | None = None


def _forward_of(batch: Batch) -> Forward:
    assert isinstance(batch, _ForwardBatch) and batch.forward is not None
    return batch.forward


def run_forwards(model: Model, forwards: Sequence[Forward]) -> list[list[RowOutput]]:
    """Runs forward passes, pipelined over the stages, and returns for each one the outputs of its rows.

    It also updates the sampler of each forward pass with the chosen tokens. All ranks of the model call this
    function together and get equal results.
    """

    def batches() -> Iterator[Batch]:
        for forward in (forward for forward in forwards if forward.captured is None):
            tokens = forward.tokens
            yield _ForwardBatch(tokens, tokens, tokens, positions=forward.positions, forward=forward)

    def stage(
        hidden: HiddenStates | None, batch: Batch, finish: Callable[[HeadInput], Tensor], chunk: int
    ) -> HiddenStates | Tensor:
        current = _forward_of(batch)
        if model.adapter_rows is not None:
            model.adapter_rows.rows = current.adapters
        rows = torch.arange(len(current.last), device=current.last.device)
        read_positions = rows * batch.tokens.shape[1] + current.last if current.targets is None else None
        lengths = None if current.lengths is None else current.lengths.to(current.last.device)
        context = InferenceContext(
            cache=current.cache, last_tokens=current.last, logit_positions=read_positions, text_lengths=lengths
        )
        return model.stage(hidden, batch, finish, chunk, context)

    run = forward_only(
        stage,
        batches(),
        model.args,
        model.groups,
        lambda head, batch: _read(model, _forward_of(batch), head.logits()),
        dtype=model.dtype,
        shape=lambda batch: (len(batch.tokens), _forward_of(batch).width),
    )
    waiting = iter(run)
    with torch.no_grad():
        numbers = [
            next(waiting) if forward.captured is None else _read(model, forward, forward.captured())
            for forward in forwards
        ]
    # All results are copied from the device at once.
    flat = (torch.cat([values.flatten() for values in numbers]) if len(numbers) > 1 else numbers[0].flatten()).cpu()
    results, start = [], 0
    for forward, values in zip(forwards, numbers, strict=True):
        row_values = flat[start : start + values.numel()].view(values.shape)
        forward.sampler.update(row_values[:, 0].long().clamp(min=0))
        results.append(_rows(forward, row_values))
        start += values.numel()
    return results


def _read(model: Model, forward: Forward, logits: Tensor) -> Tensor:
    """Samples the next token of each row and returns the values to report, `[rows, width]` (`Forward.width`).

    logits: `[rows, 1, vocab/T]`, or `[seq, rows, vocab/T]` if the forward pass has targets; T: number of
        tensor ranks.
    """
    group = model.groups.group("tensor")
    full_logits = gather_from_tensor(logits, group)[..., : model.columns].float()
    logits = (
        full_logits[:, 0] if forward.targets is None else full_logits[forward.last, torch.arange(len(forward.last))]
    )
    vocab = model.tokenizer.vocab_size
    chosen = forward.sampler.sample(logits[:, :vocab], forward.uniforms)
    parts = [chosen.unsqueeze(1).float()]
    if forward.top is not None:
        divided = logits if forward.divisors is None else logits / forward.divisors.to(logits.device).unsqueeze(1)
        parts.append(_logprobs(divided, chosen.clamp(min=0), forward.top, vocab))
    if forward.top is not None and forward.targets is not None:
        for row, targets in enumerate(forward.targets.to(logits.device)):  # one row at a time, to save memory
            parts.append(_logprobs(full_logits[:, row], targets, forward.top, vocab).flatten().unsqueeze(0))
        parts[2:] = [torch.cat(parts[2:])]
    numbers = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if group is not None:  # sums may be rounded differently on each rank
        dist.broadcast(numbers, src=model.groups.members["tensor"][0], group=group)
    return numbers


def _logprobs(logits: Tensor, tokens: Tensor, top: int, vocab: int) -> Tensor:
    """Returns log-probabilities of each row, `[rows, 1 + 2 top]`.

    Each row holds the log-probability of its token in `tokens`, then the ids of the `top` most likely tokens
    (below `vocab`), then their log-probabilities.
    """
    total = logits.logsumexp(-1, keepdim=True)
    best, ids = logits[:, :vocab].topk(top)
    return torch.cat([logits.gather(1, tokens.unsqueeze(1)) - total, ids.float(), best - total], dim=1)


def _rows(forward: Forward, numbers: Tensor) -> list[RowOutput]:
    if forward.top is None:
        return [RowOutput(int(token)) for token in numbers[:, 0].tolist()]
    width = 1 + 2 * forward.top
    outputs = []
    for row, values in enumerate(numbers.tolist()):
        token = int(values[0])
        targets = []
        if forward.targets is not None:
            places = zip(forward.targets[row].tolist(), range(1 + width, len(values), width), strict=True)
            targets = [_logprob(target, values[place : place + width]) for target, place in places]
        outputs.append(RowOutput(token, _logprob(token, values[1 : 1 + width]), targets))
    return outputs


def _logprob(token: int, values: Sequence[float]) -> Logprob:
    top = len(values) // 2
    ids, logprobs = values[1 : 1 + top], values[1 + top :]
    return Logprob(token, values[0], tuple((int(i), value) for i, value in zip(ids, logprobs, strict=True)))


class DecodeBatch:
    """Holds the input arrays of rows that decode one token per step, while the same rows run together."""

    def __init__(
        self,
        rows: list[SequenceState],
        capacity: int,
        adapters: Tensor | None,
        state_slots: Sequence[int] | None,
        sampler: TokenSampler,
        top: int | None,
        device: torch.device,
        captured: CapturedDecode | None,
    ) -> None:
        """Allocates the arrays and fills them with each row's last token.

        rows: the rows, shortest first. capacity: most cache blocks of a row, 0 without attention. adapters,
            sampler, top: as in `Forward`. state_slots: as `CacheRows.states`. captured: CUDA graphs for the
            steps; None: the stage runs without graphs.
        """
        self.rows, self.sampler, self.top, self.adapters = rows, sampler, top, adapters
        self.state_slots, self.device, self.captured = state_slots, device, captured
        self.states = None if state_slots is None else torch.tensor(state_slots, device=device)
        self.tokens = np.array([[row.tokens[-1]] for row in rows], np.int64)
        self.positions = np.array([[row.computed] for row in rows], np.int64)
        self.table = np.zeros((len(rows), capacity), np.int64)
        self.num_blocks = [0] * len(rows)
        self.row_numbers = np.arange(len(rows))
        self.last = torch.zeros(len(rows), dtype=torch.long, device=device)

    def _extend_table(self) -> None:
        """Adds the blocks that the rows have allocated since the last step to the block table."""
        for i, (row, count) in enumerate(zip(self.rows, self.num_blocks, strict=True)):
            if len(row.blocks) > count:
                self.table[i, count : len(row.blocks)] = row.blocks[count:]
                self.num_blocks[i] = len(row.blocks)

    def forward(self, cache: KVCache, uniforms: Sequence[float], divisors: Tensor | None) -> Forward:
        """Returns a forward pass that computes the last token of each row. uniforms, divisors: as in
        `Forward`."""
        self._extend_table()
        places = self.positions[:, 0]
        slots = places[:0]
        if self.table.shape[1]:
            slots = self.table[self.row_numbers, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        used_table = self.table[:, : max(self.num_blocks)]
        tokens = torch.from_numpy(self.tokens)
        if self.captured is not None:
            rows = DecodeRows(self.tokens[:, 0], places, slots, used_table, self.state_slots)
            return Forward(
                tokens, None, self.last, None, self.sampler, uniforms, self.top, divisors=divisors,
                captured=partial(self.captured.logits, rows),
            )  # fmt: skip
        table = torch.from_numpy(np.ascontiguousarray(used_table))
        slots_tensor, table = torch.from_numpy(slots).to(self.device), table.to(self.device)
        view = cache.with_rows(slots_tensor, table, _parts(self.num_blocks), self.states)
        return Forward(
            tokens, torch.from_numpy(self.positions), self.last, view, self.sampler, uniforms, self.top,
            adapters=self.adapters, divisors=divisors,
        )  # fmt: skip

    def advance(self) -> None:
        """Prepares the arrays for the next step, which computes the token that each row has just received."""
        self.tokens[:, 0] = [row.tokens[-1] for row in self.rows]
        self.positions += 1


_PART = 24  # a split into two parts must save at least this many reads of blocks


def _parts(blocks: Sequence[int], first_row: int = 0) -> list[tuple[int, int, int]]:
    """Returns `CacheRows.parts`: splits rows, which are sorted by length, into groups that attend together
    with little padding.

    blocks: number of cache blocks of each row. first_row: index of the first row.
    """
    single_part_cost, longest = len(blocks) * blocks[-1], blocks[-1]
    costs = [i * blocks[i - 1] + (len(blocks) - i) * longest for i in range(1, len(blocks))]
    lowest_cost = min(costs, default=single_part_cost)
    if single_part_cost - lowest_cost < _PART:
        return [(first_row, first_row + len(blocks), longest)]
    split_row = costs.index(lowest_cost) + 1
    return [*_parts(blocks[:split_row], first_row), *_parts(blocks[split_row:], first_row + split_row)]
