"""Log-probabilities of continuations: what lm-eval, `text_gen_type: score` and precomputed references are
made of."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.data import Batch
from megatron.distributed import run_on_all_ranks
from megatron.generation.batching.memory_budget import ForwardBudget, forward_budget
from megatron.generation.scoring.tree_rows import PADDING, ScoreRequest, TreeRow, make_tree_rows, rolling_windows
from megatron.model import HiddenStates, InferenceContext, Model, forward_only
from megatron.model.positions import rope_length_limit
from megatron.mpu import HeadInput
from megatron.neox_arguments import ConfigError

__all__ = ["Overlong", "ScoreRequest", "ContinuationScore", "rolling_windows", "score", "score_texts"]

Overlong = Literal["truncate_left", "refuse", "skip"]
_MASK_MULTIPLE = 8  # keys of a mask, as kernels on GPUs like them
_VALUES_AT_ONCE = 1 << 26  # of logits, when they are read in fp32


@dataclass(frozen=True)
class ContinuationScore:
    """The log-probability of each token of a continuation, in nats. greedy: of each, whether no token was
    more likely.

    truncated: tokens at the beginning of the context that were left out; skipped: the request was too long
    and not run, logprobs are -inf and greedy is False.
    """

    logprobs: list[float]
    greedy: list[bool]
    truncated: int = 0
    skipped: bool = False


def score(
    model: Model,
    requests: Sequence[ScoreRequest],
    *,
    batch_size: int | None = None,
    overlong: Overlong = "truncate_left",
    budget: ForwardBudget | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[ContinuationScore]:
    """Score every request, the same on every rank and in every layout; all ranks call it together.

    Requests of equal contexts share its run, but in models with states (Mamba's). batch_size: rows (contexts)
    of a forward; None: as many as memory allows. overlong: what is done with more tokens than the model has
    positions. budget: of an earlier call, instead of asking for memory again. on_progress: told on every rank
    about how many requests are done. Raises ConfigError for a text that is too long and may not be cut,
    CheckpointError when logits are not numbers.
    """
    fitting: dict[int, _Fitting] = {}
    for i, request in enumerate(requests):
        fits = _fit(i, request, model.positions, overlong)
        if fits is not None:
            fitting[i] = fits
    ntk = rope_length_limit(model.args)
    rows = make_tree_rows(
        [(i, fits.request) for i, fits in fitting.items()], model.args.hidden_size, ntk,
        branching=not model.args.mamba_blocks,
    )  # fmt: skip
    budget = budget or forward_budget(model, batch_size)
    size, rank = model.groups.size("data"), model.groups.rank("data")
    shares = [list(_batches(rows[i::size], budget)) for i in range(size)]
    forwards = max(map(len, shares)) if model.lockstep else len(shares[rank])

    def report(done: int) -> None:
        on_progress(min(done * size, len(fitting)))

    def run() -> dict[int, tuple[list[float], list[bool]]]:
        return _run(model, shares[rank], forwards, report)

    results = {i: scored for share in run_on_all_ranks(model.groups, run) for i, scored in share.items()}
    if any(value != value for logprobs, _ in results.values() for value in logprobs):
        raise CheckpointError(
            f"the model gives NaN as logits in {model.args.params_dtype}: its weights are damaged or precision cannot "
            "hold its activations; load another `iteration`, or set precision"
        )
    on_progress(len(requests))
    _report(fitting, requests, model.positions)
    return [
        ContinuationScore(*results[i], fitting[i].truncated)
        if i in fitting
        else ContinuationScore([float("-inf")] * len(requests[i][1]), [False] * len(requests[i][1]), skipped=True)
        for i in range(len(requests))
    ]


def score_texts(
    model: Model,
    texts: Sequence[Sequence[ScoreRequest]],
    *,
    overlong: Overlong,
    budget: ForwardBudget,
    on_progress: Callable[[float], None],
) -> list[list[ContinuationScore]]:
    """`score` for texts of several requests each. on_progress: told about the share that is done."""
    requests = [request for text in texts for request in text]

    def report(done: int) -> None:
        on_progress(done / max(1, len(requests)))

    scores = iter(score(model, requests, overlong=overlong, budget=budget, on_progress=report))
    return [[next(scores) for _ in text] for text in texts]


# -- length --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fitting:
    request: ScoreRequest
    truncated: int = 0


def _fit(number: int, request: ScoreRequest, positions: int, overlong: Overlong) -> _Fitting | None:
    """A request that the model has positions for (the last token is not run); None: it is skipped."""
    context, continuation = request
    if not len(context):
        raise ValueError(f"request {number} has no context; give it the token that begins a document")
    over = len(context) + len(continuation) - 1 - positions
    if over <= 0:
        return _Fitting(request)
    if overlong == "skip":
        return None
    if overlong == "refuse" or over >= len(context):
        what = f"{len(context)} tokens and {len(continuation)} to be scored"
        fix = "set truncate_left or skip" if over < len(context) else "set skip"
        raise ConfigError(
            [f"eval_overlong: {overlong}: text {number} has {what}, the model {positions} positions; {fix}"]
        )
    return _Fitting((context[over:], continuation), over)


def _report(fitting: dict[int, _Fitting], requests: Sequence[ScoreRequest], positions: int) -> None:
    skipped, cut = len(requests) - len(fitting), sum(fit.truncated > 0 for fit in fitting.values())
    if skipped or cut:
        done = " and ".join([f"{cut} lost their beginning"] * (cut > 0) + [f"{skipped} were skipped"] * (skipped > 0))
        logging.getLogger("megatron").info(
            f"eval_overlong: of {len(requests)} texts, {done}: longer than the model's {positions} positions"
        )


# -- forwards ------------------------------------------------------------------------------------------------


def _batches(rows: Sequence[TreeRow], budget: ForwardBudget) -> Iterator[list[TreeRow]]:
    """Neighbours in length, as many as the budget allows and at least one."""
    batch: list[TreeRow] = []
    wanted = 0
    for row in rows:
        width = max(len(row.tokens), len(batch[0].tokens)) if batch else len(row.tokens)
        same = not batch or row.branched == batch[0].branched
        if batch and not (same and budget.allows(len(batch) + 1, width, wanted + len(row.wanted), row.branched)):
            yield batch
            batch, wanted = [], 0
        batch.append(row)
        wanted += len(row.wanted)
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class _Batch(Batch):
    """Rows padded on the right. branches, last, wanted: as of `InferenceContext`; rows of texts have neither
    branches nor positions, others no last token. places, targets: `[m]` int64, which of the `wanted` logits
    are read, at which token."""

    branches: Tensor | None = None
    last: Tensor | None = None
    wanted: Tensor | None = None
    places: Tensor | None = None
    targets: Tensor | None = None


def _batch(rows: list[TreeRow], on_gpu: bool) -> _Batch:
    width, branched = max(len(row.tokens) for row in rows), rows[0].branched
    if branched and on_gpu:
        width = -(-width // _MASK_MULTIPLE) * _MASK_MULTIPLE

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([getattr(row, name) + [value] * (width - len(row.tokens)) for row in rows])

    places: list[int] = []
    targets: list[int] = []
    wanted: list[int] = []
    for number, row in enumerate(rows):
        for _, columns_read, labels in row.picks:
            places += [len(wanted) + place for place in columns_read]
            targets += labels
        wanted += [number * width + column for column in row.wanted]
    tokens = padded("tokens", 0)
    nothing = torch.zeros_like(tokens)
    return _Batch(
        tokens, nothing, nothing,
        positions=padded("positions", 0) if branched else None,
        branches=padded("branches", PADDING) if branched else None,
        last=None if branched else torch.tensor([len(row.tokens) - 1 for row in rows]),
        wanted=torch.tensor(wanted, dtype=torch.int64),
        places=torch.tensor(places, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
    )  # fmt: skip


def _run(
    model: Model, batches: list[list[TreeRow]], forwards: int, on_progress: Callable[[int], None]
) -> dict[int, tuple[list[float], list[bool]]]:
    """This data rank's results, by request; {} on all ranks of its model but one.

    forwards: of the stage, those behind the batches over nothing.
    """
    groups, on_gpu = model.groups, model.groups.device.type == "cuda"
    scores: dict[int, tuple[list[float], list[bool]]] = {}
    done = 0
    at_once = 2 * groups.size("pipe") if groups.size("pipe") > 1 else 1  # so that stages work side by side
    for first in range(0, len(batches), at_once):
        chunk = batches[first : first + at_once]
        results = _forward(model, [_batch(rows, on_gpu) for rows in chunk])
        for rows, values in zip(chunk, results, strict=True):
            if groups.rank("tensor") == 0 and groups.is_first_stage:
                scores |= _by_request(rows, values.cpu())
            done += sum(len(row.picks) for row in rows)
        on_progress(done)
    for _ in range(len(batches), forwards):
        _forward(model, [_batch([TreeRow([0], [0], [0], {0: 0}, [(0, [0], [0])])], on_gpu)])
    return scores


def _by_request(rows: list[TreeRow], values: Tensor) -> dict[int, tuple[list[float], list[bool]]]:
    scores, begun = {}, 0
    logprobs, greedy = values[0].tolist(), (values[1] > 0).tolist()
    for number, places, _ in (pick for row in rows for pick in row.picks):
        end = begun + len(places)
        scores[number] = (logprobs[begun:end], greedy[begun:end])
        begun = end
    return scores


def _forward(model: Model, batches: list[_Batch]) -> list[Tensor]:
    """`[2, m]` of each batch, on every rank of the model: log-probabilities, and 1 where no token is more
    likely."""

    def stage(
        hidden: HiddenStates | None, batch: Batch, finish: Callable[[HeadInput], Tensor]
    ) -> HiddenStates | Tensor:
        assert isinstance(batch, _Batch)
        context = InferenceContext(last_tokens=batch.last, branch_ids=batch.branches, logit_positions=batch.wanted)
        return model.stage(hidden, batch, finish, context)

    return forward_only(
        stage, batches, model.args, model.groups, partial(_read, model), dtype=model.dtype, shape=_shape
    )


def _shape(batch: Batch) -> tuple[int, ...]:
    assert isinstance(batch, _Batch) and batch.places is not None
    return 2, len(batch.places)


def _read(model: Model, head: HeadInput, batch: Batch) -> Tensor:
    """`[2, m]` of hidden states `[n, 1, hidden]`, m being the tokens to score: log-probabilities, and 1 where
    no token is more likely."""
    assert isinstance(batch, _Batch) and batch.places is not None and batch.targets is not None
    groups, logits = model.groups, head.logits()[:, 0]
    size, group = logits.shape[1], groups.group("tensor")
    first = groups.rank("tensor") * size
    columns = max(0, min(size, (model.columns or model.args.padded_vocab_size) - first))
    sums, tops, bests = [], [], []
    for part in logits.split(max(1, _VALUES_AT_ONCE // size)):
        values = part.float()
        if columns < size:
            values = values.masked_fill(torch.arange(size, device=values.device) >= columns, float("-inf"))
        sums.append(values.logsumexp(-1))
        top, best = values.max(-1)
        tops.append(top)
        bests.append(best + first)
    local_targets = batch.targets - first
    foreign = (local_targets < 0) | (local_targets >= columns)
    label = logits[batch.places, local_targets.masked_fill(foreign, 0)].float().masked_fill(foreign, float("-inf"))
    total, top, best = torch.cat(sums), torch.cat(tops), torch.cat(bests)
    if group is not None:
        highest = torch.cat([total, top, label])
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        highest_sum, highest_top, label = highest.split([len(total), len(top), len(label)])
        best = best.masked_fill(top < highest_top, torch.iinfo(torch.int64).max)
        dist.all_reduce(best, op=dist.ReduceOp.MIN, group=group)
        share = (total - highest_sum).exp()
        dist.all_reduce(share, group=group)
        total = share.log() + highest_sum
    return torch.stack([label - total[batch.places], (best[batch.places] == batch.targets).float()])
