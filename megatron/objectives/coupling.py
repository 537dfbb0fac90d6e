"""Losses in which the examples of a step meet: what each is compared with, taken over all micro-batches and ranks."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.objectives.objective import Score
from megatron.objectives.preference import reference_scores

# From values `[pairs]` of all pairs of a step (chosen, rejected; policy, then reference) to an anchor for either side.
Matching = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _of_rank(values: Tensor, by: Tensor) -> Tensor:
    """For each place the element of `values` that has the rank which `by` has there."""
    return torch.empty_like(values).scatter_(0, by.argsort(stable=True), values.sort().values)


def match_gaps(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor]:
    """aot: the reference's gap between chosen and rejected of the rank of the policy's."""
    gaps = _of_rank(ref_chosen - ref_rejected, chosen - rejected)
    return gaps, torch.zeros_like(gaps)


def match_sides(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor]:
    """aot_unpaired: the other side's log-ratio of the rank of one's own."""
    above, below = chosen - ref_chosen, rejected - ref_rejected
    return _of_rank(below, above), _of_rank(above, below)


def _from_all(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """Columns of every data rank `[k, all]`, and where this rank's begin."""
    if group is None:
        return values, 0
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = torch.zeros(size, dtype=torch.int64, device=values.device)
    counts[rank] = values.shape[1]
    dist.all_reduce(counts, group=group)
    widths = counts.tolist()
    padded = values.new_zeros(values.shape[0], max(widths))
    padded[:, : values.shape[1]] = values
    parts = [torch.empty_like(padded) for _ in widths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1), sum(widths[:rank])


def couple_pairs(
    batches: list[Batch], score: Score, group: dist.ProcessGroup | None, *, matching: Matching, reference_free: bool
) -> list[Batch]:
    """Micro-batches of pairs with the anchors of `matching`."""
    scores = score(batches)
    rows = []
    for batch, found in zip(batches, scores, strict=True):
        assert batch.preference_labels is not None
        reference = torch.zeros_like(found) if reference_free else reference_scores(batch)
        rows.append(
            torch.stack([found[0::2], found[1::2], reference[0::2], reference[1::2], batch.preference_labels[0::2]])
        )
    every, begin = _from_all(torch.cat(rows, 1), group)
    real = every[4] != 0
    anchors = every.new_zeros(2, every.shape[1])
    anchors[:, real] = torch.stack(matching(*every[:4, real]))
    coupled = []
    for batch, found in zip(batches, scores, strict=True):
        end = begin + len(found) // 2
        coupled.append(replace(batch, baseline=anchors[:, begin:end].t().flatten()))
        begin = end
    return coupled


def couple_kl(batches: list[Batch], score: Score, group: dist.ProcessGroup | None) -> list[Batch]:
    """Micro-batches of KTO with its KL, the mean log-ratio of answers to other prompts, not below 0."""
    others = [batch.kl_batch for batch in batches if batch.kl_batch is not None]
    if len(others) < len(batches):
        raise ValueError("KTO estimates its KL from answers to other prompts, and a batch has none (`Batch.kl_batch`)")
    total = torch.zeros(2, device=batches[0].tokens.device)
    for other, found in zip(others, score(others), strict=True):
        assert other.preference_labels is not None
        real = (other.preference_labels != 0).float()
        total += torch.stack([((found - reference_scores(other)) * real).sum(), real.sum()])
    if group is not None:
        dist.all_reduce(total, group=group)
    kl = (total[0] / total[1].clamp(min=1.0)).clamp(min=0.0)
    return [
        replace(batch, baseline=kl.expand_as(batch.preference_labels))
        for batch in batches
        if batch.preference_labels is not None
    ]
