"""Computes log-probabilities of continuations, for lm-eval and for `text_gen_type: score` and
`precompute`."""

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
_MASK_MULTIPLE = 8  # on GPUs, the width of masks is padded to a multiple of it, which kernels prefer
_VALUES_AT_ONCE = 1 << 26  # number of logits that are converted to fp32 at once


@dataclass(frozen=True)
class ContinuationScore:
    """The scores of one continuation.

    logprobs: log-probability of each token of the continuation, in nats.
    greedy: for each token, whether it is the model's most likely token.
    truncated: number of tokens that were removed from the beginning of the context.
    skipped: whether the request was too long and was not run; all logprobs are then -inf, and all greedy
        False.
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
    """Returns the score of every request. It is the same on every rank and in every parallel layout.

    All ranks call this function together. Requests with the same context share the context's computation,
    except in models with Mamba states. Raises CheckpointError for NaN logits, and ConfigError for a request
    that is refused or that is too long even when truncated.

    batch_size: rows (contexts) per forward pass; None: as many as memory allows.
    overlong: what to do with a request that exceeds the model's positions: truncate_left, refuse or skip.
    budget: a result of `forward_budget`, which replaces `batch_size`; None: it is computed now.
    on_progress: called on every rank with the approximate number of finished requests.
    """
    all_fitted = [_fit(i, request, model.positions, overlong) for i, request in enumerate(requests)]
    fitting = {i: fitted for i, fitted in enumerate(all_fitted) if fitted is not None}
    ntk = rope_length_limit(model.args)
    rows = make_tree_rows(
        [(i, request) for i, (request, _) in fitting.items()], model.args.hidden_size, ntk,
        branching=not model.args.state_blocks,
    )  # fmt: skip
    budget = budget or forward_budget(model, batch_size)
    size, rank = model.groups.size("data"), model.groups.rank("data")
    shares = [list(_batches(rows[i::size], budget)) for i in range(size)]
    forwards = max(map(len, shares)) if model.lockstep else len(shares[rank])

    def report(done: int) -> None:
        on_progress(min(done * size, len(fitting)))

    run = partial(_run, model, shares[rank], forwards, report)
    results = {i: scored for share in run_on_all_ranks(model.groups, run) for i, scored in share.items()}
    if any(value != value for logprobs, _ in results.values() for value in logprobs):
        raise CheckpointError(
            f"the model's logits are NaN in {model.args.params_dtype}: its weights are damaged, or activations "
            "overflow this precision; load another `iteration`, or set precision: fp32"
        )
    on_progress(len(requests))
    _report([num_truncated for _, num_truncated in fitting.values()], len(requests), model.positions)
    return [
        ContinuationScore(*results[i], fitting[i][1])
        if i in fitting
        else ContinuationScore([float("-inf")] * len(continuation), [False] * len(continuation), skipped=True)
        for i, (_, continuation) in enumerate(requests)
    ]


def score_texts(
    model: Model,
    texts: Sequence[Sequence[ScoreRequest]],
    *,
    overlong: Overlong,
    budget: ForwardBudget,
    on_progress: Callable[[float], None],
) -> list[list[ContinuationScore]]:
    """Scores texts, each of which is a list of requests. Returns the list of scores of each text.

    overlong, budget: as in `score`. on_progress: called with the finished share, 0 to 1.
    """
    requests = [request for text in texts for request in text]

    def report(done: int) -> None:
        on_progress(done / max(1, len(requests)))

    scores = iter(score(model, requests, overlong=overlong, budget=budget, on_progress=report))
    return [[next(scores) for _ in text] for text in texts]


# -- length --------------------------------------------------------------------------------------------------


def _fit(number: int, request: ScoreRequest, positions: int, overlong: Overlong) -> tuple[ScoreRequest, int] | None:
    """Truncates the context of a request on the left, if needed, so that the request fits the model's
    positions.

    Returns the request and the number of tokens that were removed. Returns None if the request is too long
    and `overlong` is skip. Raises ConfigError if it is refuse, or if truncating cannot help. The last token
    of a request needs no position.

    number: the request's index, for error messages.
    """
    context, continuation = request
    if not len(context):
        raise ValueError(f"request {number} has no context; give it the token that begins a document")
    excess = len(context) + len(continuation) - 1 - positions
    if excess <= 0:
        return request, 0
    if overlong == "skip":
        return None
    if overlong == "refuse" or excess >= len(context):
        lengths = f"a context of {len(context)} tokens and {len(continuation)} to be scored"
        fix = "set eval_overlong to truncate_left or skip" if excess < len(context) else "set eval_overlong to skip"
        raise ConfigError(
            [f"eval_overlong: {overlong}: text {number} has {lengths}, but the model has {positions} positions; {fix}"]
        )
    return (context[excess:], continuation), excess


def _report(truncated: Sequence[int], requests: int, positions: int) -> None:
    """Logs how many requests were truncated and how many were skipped.

    truncated: number of tokens that each request lost, without skipped requests. requests: number of all
        requests.
    """
    num_skipped, num_truncated = requests - len(truncated), sum(count > 0 for count in truncated)
    if num_skipped or num_truncated:
        done = " and ".join(
            [f"{num_truncated} lost their beginning"] * (num_truncated > 0)
            + [f"{num_skipped} were skipped"] * (num_skipped > 0)
        )
        logging.getLogger("megatron").info(
            f"eval_overlong: of {requests} texts, {done}, as they are longer than the model's {positions} positions"
        )


# -- forwards ------------------------------------------------------------------------------------------------


def _batches(rows: Sequence[TreeRow], budget: ForwardBudget) -> Iterator[list[TreeRow]]:
    """Yields batches of consecutive rows. Each batch is as large as the budget allows, and at least one row.

    Rows with branches and rows without branches are never in one batch.
    """
    batch: list[TreeRow] = []
    num_logits = 0
    for row in rows:
        width = max(len(row.tokens), len(batch[0].tokens)) if batch else len(row.tokens)
        same_kind = not batch or row.branched == batch[0].branched
        if batch and not (
            same_kind and budget.allows(len(batch) + 1, width, num_logits + len(row.logit_columns), row.branched)
        ):
            yield batch
            batch, num_logits = [], 0
        batch.append(row)
        num_logits += len(row.logit_columns)
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class _Batch(Batch):
    """A batch of `TreeRow`s, padded on the right.

    branches, last, logit_positions: `branch_ids`, `last_tokens` and `logit_positions` of `InferenceContext`.
        Without branches, `branches` and `positions` are None; with branches, `last` is None.
    targets: `[m]` int64, the tokens to score.
    places: `[m]` int64, for each target the index in `logit_positions` of the logits that predict the target.
    """

    branches: Tensor | None = None
    last: Tensor | None = None
    logit_positions: Tensor | None = None
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
    logit_positions: list[int] = []
    for number, row in enumerate(rows):
        for _, columns_read, labels in row.picks:
            places += [len(logit_positions) + place for place in columns_read]
            targets += labels
        logit_positions += [number * width + column for column in row.logit_columns]
    tokens = padded("tokens", 0)
    zeros = torch.zeros_like(tokens)
    return _Batch(
        tokens, zeros, zeros,
        positions=padded("positions", 0) if branched else None,
        branches=padded("branches", PADDING) if branched else None,
        last=None if branched else torch.tensor([len(row.tokens) - 1 for row in rows]),
        logit_positions=torch.tensor(logit_positions, dtype=torch.int64),
        places=torch.tensor(places, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
    )  # fmt: skip


def _run(
    model: Model, batches: list[list[TreeRow]], forwards: int, on_progress: Callable[[int], None]
) -> dict[int, tuple[list[float], list[bool]]]:
    """Runs this data-parallel rank's batches and returns their scores.

    The scores are {request number: (log-probabilities, whether each token is the most likely)} on tensor rank
    0 of the first pipeline stage, and {} on other ranks.

    forwards: number of forward passes to run. If there are fewer batches, dummy rows are run, so that all
        data-parallel ranks run the same number.
    """
    groups, on_gpu = model.groups, model.groups.device.type == "cuda"
    scores: dict[int, tuple[list[float], list[bool]]] = {}
    done = 0
    at_once = 2 * groups.size("pipe") if groups.size("pipe") > 1 else 1  # so that all stages are busy
    for start in range(0, len(batches), at_once):
        chunk = batches[start : start + at_once]
        results = _forward(model, [_batch(rows, on_gpu) for rows in chunk])
        for rows, values in zip(chunk, results, strict=True):
            if groups.rank("tensor") == 0 and groups.is_first_stage:
                scores |= _scores_by_request(rows, values.cpu())
            done += sum(len(row.picks) for row in rows)
        on_progress(done)
    for _ in range(len(batches), forwards):
        _forward(model, [_batch([TreeRow([0], [0], [0], {0: 0}, [(0, [0], [0])])], on_gpu)])
    return scores


def _scores_by_request(rows: list[TreeRow], values: Tensor) -> dict[int, tuple[list[float], list[bool]]]:
    scores, start = {}, 0
    logprobs, greedy = values[0].tolist(), (values[1] > 0).tolist()
    for number, places, _ in (pick for row in rows for pick in row.picks):
        end = start + len(places)
        scores[number] = (logprobs[start:end], greedy[start:end])
        start = end
    return scores


def _forward(model: Model, batches: list[_Batch]) -> list[Tensor]:
    """Runs batches and returns the scores of each batch, `[2, m]`, on every rank of the model.

    They are the log-probabilities of the batch's m targets, and 1 for each target that is the most likely
    token, else 0.
    """

    def stage(
        hidden: HiddenStates | None, batch: Batch, finish: Callable[[HeadInput], Tensor], chunk: int
    ) -> HiddenStates | Tensor:
        assert isinstance(batch, _Batch)
        context = InferenceContext(
            last_tokens=batch.last, branch_ids=batch.branches, logit_positions=batch.logit_positions
        )
        return model.stage(hidden, batch, finish, chunk, context)

    return forward_only(
        stage, batches, model.args, model.groups, partial(_read, model), dtype=model.dtype, shape=_shape
    )


def _shape(batch: Batch) -> tuple[int, ...]:
    assert isinstance(batch, _Batch) and batch.places is not None
    return 2, len(batch.places)


def _read(model: Model, head: HeadInput, batch: Batch) -> Tensor:
    """Computes the scores of a batch, `[2, m]`, from its hidden states `[n, 1, hidden]`.

    They are the log-probabilities of the batch's m targets, and 1 for each target that is the most likely
    token, else 0.
    """
    assert isinstance(batch, _Batch) and batch.places is not None and batch.targets is not None
    groups, logits = model.groups, head.logits()[:, 0]
    size, group = logits.shape[1], groups.group("tensor")
    first_column = groups.rank("tensor") * size
    columns = max(0, min(size, (model.columns or model.args.padded_vocab_size) - first_column))
    sums, tops, bests = [], [], []
    for part in logits.split(max(1, _VALUES_AT_ONCE // size)):
        values = part.float()
        if columns < size:
            values = values.masked_fill(torch.arange(size, device=values.device) >= columns, float("-inf"))
        sums.append(values.logsumexp(-1))
        top, best = values.max(-1)
        tops.append(top)
        bests.append(best + first_column)
    local_targets = batch.targets - first_column
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
