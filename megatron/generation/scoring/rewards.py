"""Scores full texts with a reward model, and computes the accuracy and calibration of its scores on pairs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import Responses
from megatron.distributed import run_on_all_ranks
from megatron.generation.batching.memory_budget import ForwardBudget
from megatron.model import Model, forward_only
from megatron.model.positions import rope_length_limit
from megatron.mpu import HeadInput
from megatron.objectives import response_scores


def score_documents(
    model: Model,
    documents: Sequence[np.ndarray],
    budget: ForwardBudget,
    on_progress: Callable[[float], None] = lambda share: None,
) -> list[float]:
    """Returns the reward model's score of each text, read at the text's last token.

    The scores are the same on every rank and in every parallel layout. All ranks call this function together.
    A score may be NaN or infinite if the model is damaged or its precision is too low.

    documents: token ids of each text, `[tokens]`, at least one token and at most `model.positions`.
    budget: the limits of a forward pass.
    on_progress: called with the finished share, 0 to 1.
    """
    groups, size = model.groups, model.groups.size("data")
    equal_lengths_only = rope_length_limit(model.args) is not None  # frequencies depend on the length of a row
    batches = list(_batches(documents, budget, equal_lengths_only))[groups.rank("data") :: size]

    def read(head: HeadInput, batch: Batch) -> Tensor:
        return response_scores(head, batch, groups.group("tensor"))

    def run() -> dict[int, float]:
        scores: dict[int, float] = {}
        for done, numbers in enumerate(batches, 1):
            batch = _batch([documents[i] for i in numbers])
            (values,) = forward_only(
                model.stage, [batch], model.args, groups, read, dtype=model.dtype, shape=lambda b: (len(b.tokens),)
            )
            scores |= dict(zip(numbers, values.tolist(), strict=True))
            on_progress(done / len(batches))
        return scores

    results = {i: score for share in run_on_all_ranks(groups, run) for i, score in share.items()}
    return [results[i] for i in range(len(documents))]


def _batches(documents: Sequence[np.ndarray], budget: ForwardBudget, equal_lengths_only: bool) -> Iterator[list[int]]:
    """Yields batches as lists of indices into `documents`, the longest documents first.

    equal_lengths_only: whether a batch may hold only texts of one length.
    """
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
    batch: list[int] = []
    for i in order:
        width = len(documents[batch[0]]) if batch else 0
        other_length = equal_lengths_only and batch and len(documents[i]) != width
        if batch and (other_length or not budget.allows(len(batch) + 1, width, len(batch) + 1, branched=False)):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _batch(documents: Sequence[np.ndarray]) -> Batch:
    """Returns a batch of texts, one per row, padded on the right. All tokens of a row are marked as one
    answer."""
    width = max(map(len, documents))
    tokens, answers = np.zeros((len(documents), width), np.int64), np.full((len(documents), width), -1, np.int64)
    for row, document in enumerate(documents):
        tokens[row, : len(document)], answers[row, : len(document)] = document, row
    empty = torch.zeros(tokens.shape, dtype=torch.int64)
    ids, real = torch.from_numpy(answers), torch.ones(len(documents))
    return Batch(torch.from_numpy(tokens), empty, empty, method=Responses(ids, real))


# -- pairs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CalibrationBin:
    """Statistics of pairs for which the reward model predicts similar probabilities.

    predicted: the mean predicted probability, at least 0.5, that the answer with the higher score is better.
    observed: the share of pairs in which the answer with the higher score is the chosen one.
    count: number of pairs.
    """

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class PairReport:
    """Statistics of a reward model's scores on pairs of a chosen and a rejected answer.

    pairs: number of pairs.
    accuracy: share of pairs in which the chosen answer has the higher score; a tie counts as wrong.
    margin: mean of the chosen answer's score minus the rejected answer's score.
    loss: mean of -log sigmoid(margin).
    calibration_error: mean over `bins` of |predicted - observed|, weighted by the number of pairs.
    """

    pairs: int
    accuracy: float
    margin: float
    loss: float
    calibration_error: float
    bins: tuple[CalibrationBin, ...]

    def __str__(self) -> str:
        return (
            f"{self.pairs} pairs: accuracy {self.accuracy:.4f}, margin {self.margin:.4f}, loss {self.loss:.4f}, "
            f"calibration error {self.calibration_error:.4f}"
        )


def report_pairs(chosen: Sequence[float], rejected: Sequence[float], bins: int = 10) -> PairReport:
    """Returns statistics of a reward model's scores on pairs.

    chosen, rejected: the scores of the chosen and of the rejected answer of each pair.
    bins: number of calibration bins, of equal width over probabilities from 0.5 to 1; empty bins are left
        out.
    """
    margins = np.asarray(chosen, np.float64) - np.asarray(rejected, np.float64)
    sure, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    places = np.minimum(((sure - 0.5) * 2 * bins).astype(int), bins - 1)
    bin_reports = []
    for place in np.unique(places):
        in_bin = places == place
        bin_reports.append(CalibrationBin(float(sure[in_bin].mean()), float(right[in_bin].mean()), int(in_bin.sum())))
    error = sum(abs(report.predicted - report.observed) * report.count for report in bin_reports) / max(1, len(margins))
    loss = float(np.logaddexp(0, -margins).mean())
    return PairReport(len(margins), float(right.mean()), float(margins.mean()), loss, error, tuple(bin_reports))
