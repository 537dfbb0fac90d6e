"""Scores of whole texts by a reward model, in any layout, and how well its pairs are calibrated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.data import Batch
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
    """The score of each text, that of its last token, the same on every rank and in every layout; all ranks
    call it together.

    documents: [tokens] ids, at least one token and at most `model.positions` each. on_progress: told about
    the share that is done. A score may be NaN or infinite, of a damaged model or in too low a precision.
    """
    groups, size = model.groups, model.groups.size("data")
    apart = rope_length_limit(model.args) is not None  # frequencies depend on the length of a row
    batches = list(_batches(documents, budget, apart))[groups.rank("data") :: size]

    def read(head: HeadInput, batch: Batch) -> Tensor:
        return response_scores(head, batch, groups.group("tensor"))

    def run() -> dict[int, float]:
        scores: dict[int, float] = {}
        for done, numbers in enumerate(batches, 1):
            batch = _batch([documents[i] for i in numbers])
            (found,) = forward_only(
                model.stage, [batch], model.args, groups, read, dtype=model.dtype, shape=lambda b: (len(b.tokens),)
            )
            scores |= dict(zip(numbers, found.tolist(), strict=True))
            on_progress(done / len(batches))
        return scores

    results = {i: score for share in run_on_all_ranks(groups, run) for i, score in share.items()}
    return [results[i] for i in range(len(documents))]


def _batches(documents: Sequence[np.ndarray], budget: ForwardBudget, apart: bool) -> Iterator[list[int]]:
    """The numbers of the texts of each forward, the longest first. apart: texts of equal length alone share
    one."""
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
    batch: list[int] = []
    for i in order:
        width = len(documents[batch[0]]) if batch else 0
        other = apart and batch and len(documents[i]) != width
        if batch and (other or not budget.allows(len(batch) + 1, width, len(batch) + 1, branched=False)):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _batch(documents: Sequence[np.ndarray]) -> Batch:
    """Texts padded on the right, each the answer of its row."""
    width = max(map(len, documents))
    tokens, answers = np.zeros((len(documents), width), np.int64), np.full((len(documents), width), -1, np.int64)
    for row, document in enumerate(documents):
        tokens[row, : len(document)], answers[row, : len(document)] = document, row
    nothing = torch.zeros(tokens.shape, dtype=torch.int64)
    ids, real = torch.from_numpy(answers), torch.ones(len(documents))
    return Batch(torch.from_numpy(tokens), nothing, nothing, response_ids=ids, preference_labels=real)


# -- pairs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs of which the model is about equally sure. predicted: the mean probability, from 0.5 on, that the
    answer with the higher score is the better one; observed: the share of them in which it was the chosen
    one; count: how many they are."""

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class PairReport:
    """What scores of pairs say. margin: the mean of chosen minus rejected; accuracy: the share in which the
    chosen one has the higher score, a tie counts as wrong; loss: the mean of -log sigmoid(margin);
    calibration_error: the mean distance of predicted and observed, weighted by pairs."""

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
    """The report on pairs with these scores. bins: of equal width, over probabilities from 0.5 to 1; those
    without pairs are left out."""
    margins = np.asarray(chosen, np.float64) - np.asarray(rejected, np.float64)
    sure, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    places = np.minimum(((sure - 0.5) * 2 * bins).astype(int), bins - 1)
    found = []
    for place in np.unique(places):
        inside = places == place
        found.append(CalibrationBin(float(sure[inside].mean()), float(right[inside].mean()), int(inside.sum())))
    error = sum(abs(one.predicted - one.observed) * one.count for one in found) / max(1, len(margins))
    loss = float(np.logaddexp(0, -margins).mean())
    return PairReport(len(margins), float(right.mean()), float(margins.mean()), loss, error, tuple(found))
