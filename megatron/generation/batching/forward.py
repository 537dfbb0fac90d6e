"""Forwards over rows of texts, and the tokens that come of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.generation.batching.requests import Logprob
from megatron.generation.sampling import TokenSampler
from megatron.model import HiddenStates, InferenceContext, KVCache, Model, forward_only
from megatron.mpu import HeadInput, gather_from_tensor


@dataclass(frozen=True)
class Forward:
    """Rows that run together, padded on the right, each up to the token whose successor is chosen.

    tokens: `[rows, seq]` int64; positions: theirs, None: texts from their beginning; last: `[rows]`, each
    row's last column; uniforms: as `TokenSampler.sample`. top: how many most likely tokens are reported,
    None: no log-probabilities. targets: `[rows, seq]`, tokens that log-probabilities are wanted of
    everywhere, or None. adapters: `[rows]` int64, the number of each row's (`Request.adapter`); None: none.
    lengths: `[rows]` int64, tokens of the whole text of each row, of which these may be a part; None: rows
    end with their texts. divisors: `[rows]` fp32, of logits before log-probabilities of chosen tokens; None:
    1."""

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

    @property
    def width(self) -> int:
        """Numbers a row: the token, then of it and of each target a log-probability and the top's ids and
        theirs."""
        reported = 0 if self.targets is None else self.targets.shape[1]
        return 1 + (0 if self.top is None else (1 + reported) * (1 + 2 * self.top))


@dataclass(frozen=True)
class RowOutput:
    """What a forward gave for one row. token: the chosen one, -1 where logits are not numbers; logprob: the
    token's; targets: log-probabilities of the targets of every column but the last."""

    token: int
    logprob: Logprob | None = None
    targets: Sequence[Logprob] = ()


def run_forwards(model: Model, forwards: Sequence[Forward]) -> list[list[RowOutput]]:
    """Run forwards in turn, on several pipeline stages at a time; the outputs of every row of each, the same
    on every rank. All ranks of the model call it together."""
    current = forwards[0]

    def batches() -> Iterator[Batch]:
        nonlocal current
        for current in forwards:
            tokens = current.tokens
            yield Batch(tokens, labels=tokens, loss_weights=tokens, positions=current.positions)

    def stage(
        hidden: HiddenStates | None, batch: Batch, finish: Callable[[HeadInput], Tensor]
    ) -> HiddenStates | Tensor:
        if model.adapter_rows is not None:
            model.adapter_rows.rows = current.adapters
        rows = torch.arange(len(current.last), device=current.last.device)
        wanted = rows * batch.tokens.shape[1] + current.last if current.targets is None else None
        lengths = None if current.lengths is None else current.lengths.to(current.last.device)
        context = InferenceContext(
            cache=current.cache, last_tokens=current.last, logit_positions=wanted, text_lengths=lengths
        )
        return model.stage(hidden, batch, finish, context)

    numbers = forward_only(
        stage,
        batches(),
        model.args,
        model.groups,
        lambda head, _: _read(model, current, head.logits()),
        dtype=model.dtype,
        shape=lambda _: (len(current.tokens), current.width),
    )
    # One copy from the device a step.
    flat = (torch.cat([one.flatten() for one in numbers]) if len(numbers) > 1 else numbers[0].flatten()).cpu()
    results, start = [], 0
    for forward, one in zip(forwards, numbers, strict=True):
        row_values = flat[start : start + one.numel()].view(one.shape)
        forward.sampler.update(row_values[:, 0].long().clamp(min=0))
        results.append(_rows(forward, row_values))
        start += one.numel()
    return results


def _read(model: Model, forward: Forward, logits: Tensor) -> Tensor:
    """`[rows, width]` of `[rows, 1, vocab/T]`, or with targets `[seq, rows, vocab/T]`."""
    group = model.groups.group("tensor")
    whole = gather_from_tensor(logits, group)[..., : model.columns].float()
    logits = whole[:, 0] if forward.targets is None else whole[forward.last, torch.arange(len(forward.last))]
    vocab = model.tokenizer.vocab_size
    chosen = forward.sampler.sample(logits[:, :vocab], forward.uniforms)
    parts = [chosen.unsqueeze(1).float()]
    if forward.top is not None:
        divided = logits if forward.divisors is None else logits / forward.divisors.to(logits.device).unsqueeze(1)
        parts.append(_logprobs(divided, chosen.clamp(min=0), forward.top, vocab))
    if forward.top is not None and forward.targets is not None:
        for row, targets in enumerate(forward.targets.to(logits.device)):  # one at a time: these are many logits
            parts.append(_logprobs(whole[:, row], targets, forward.top, vocab).flatten().unsqueeze(0))
        parts[2:] = [torch.cat(parts[2:])]
    numbers = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if group is not None:  # so that no rank's sums come out otherwise
        dist.broadcast(numbers, src=model.groups.members["tensor"][0], group=group)
    return numbers


def _logprobs(logits: Tensor, tokens: Tensor, top: int, vocab: int) -> Tensor:
    """`[rows, 1 + 2 top]`: log-probability of the token, most likely ids below `vocab`, their
    log-probabilities."""
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
    """Rows that go on by a token a step. Its arrays serve for as long as the same rows run together."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int, list[int]]],
        capacity: int,
        block_size: int,
        adapters: Tensor | None,
        states: Tensor | None,
    ) -> None:
        """rows: the last token, its place, and the blocks of each, in order of length; capacity: of blocks a
        row, 0 without attention. adapters: as of `Forward`; states: as of `CacheRows`."""
        self.block_size, self.adapters, self.states = block_size, adapters, states
        self.tokens = np.array([token for token, _, _ in rows], np.int64).reshape(-1, 1)
        self.positions = np.array([place for _, place, _ in rows], np.int64).reshape(-1, 1)
        self.table = np.zeros((len(rows), capacity), np.int64)
        self.blocks = [0] * len(rows)
        self.row_numbers = np.arange(len(rows))
        self.last = torch.zeros(len(rows), dtype=torch.long)
        for row, (_, _, blocks) in enumerate(rows):
            self.extend(row, blocks)

    def extend(self, row: int, blocks: list[int]) -> None:
        """Take note of blocks that a row has got since."""
        known = self.blocks[row]
        if len(blocks) > known:
            self.table[row, known : len(blocks)] = blocks[known:]
            self.blocks[row] = len(blocks)

    def forward(
        self,
        cache: KVCache,
        device: torch.device,
        sampler: TokenSampler,
        uniforms: Sequence[float],
        top: int | None,
        divisors: Tensor | None,
    ) -> Forward:
        places = self.positions[:, 0]
        slots = places[:0]
        if self.table.shape[1]:
            slots = self.table[self.row_numbers, places // self.block_size] * self.block_size + places % self.block_size
        table = torch.from_numpy(np.ascontiguousarray(self.table[:, : max(self.blocks)]))
        view = cache.of(torch.from_numpy(slots).to(device), table.to(device), _parts(self.blocks), self.states)
        tokens, positions = torch.from_numpy(self.tokens), torch.from_numpy(self.positions)
        return Forward(
            tokens, positions, self.last.to(device), view, sampler, uniforms, top, adapters=self.adapters,
            divisors=divisors,
        )  # fmt: skip

    def advance(self, tokens: Sequence[int]) -> None:
        """The next token of each row."""
        self.tokens[:, 0] = tokens
        self.positions += 1


_PART = 24  # blocks that may be read for nothing before it is worth to attend in one part more


def _parts(blocks: Sequence[int], first: int = 0) -> list[tuple[int, int, int]]:
    """`CacheRows.parts` of rows in order of length."""
    together, longest = len(blocks) * blocks[-1], blocks[-1]
    costs = [i * blocks[i - 1] + (len(blocks) - i) * longest for i in range(1, len(blocks))]
    least = min(costs, default=together)
    if together - least < _PART:
        return [(first, first + len(blocks), longest)]
    cut = costs.index(least) + 1
    return [*_parts(blocks[:cut], first), *_parts(blocks[cut:], first + cut)]
