"""Baselines of losses that compare an example with all examples of the optimizer step: AOT's ranks and KTO's
KL.

They are computed over all micro-batches and data-parallel ranks before the forward passes of the step.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.objectives.objective import ScoreFunction
from megatron.objectives.preference import reference_logprobs

# From log-probabilities `[pairs]` of all pairs of a step (the policy's chosen, rejected, then the
# reference's) to the baselines of the chosen and of the rejected responses, `[pairs]` each.
Matching = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _of_rank(values: Tensor, by: Tensor) -> Tensor:
    """At each place the element of `values` whose rank among them is that of the element of `by` at this
    place."""
    return torch.empty_like(values).scatter_(0, by.argsort(stable=True), values.sort().values)


def match_gaps(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor]:
    """The baselines of aot: the reference's gap between chosen and rejected that has the rank of the policy's
    gap."""
    gaps = _of_rank(ref_chosen - ref_rejected, chosen - rejected)
    return gaps, torch.zeros_like(gaps)


def match_sides(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor]:
    """The baselines of aot_unpaired: the log-ratio of the other side that has the rank of the response's
    own."""
    above, below = chosen - ref_chosen, rejected - ref_rejected
    return _of_rank(below, above), _of_rank(above, below)


def _from_all(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """The columns `[k, n]` of every data-parallel rank as `[k, sum of n]`, and the index of this rank's first
    column."""
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


def pair_baselines(
    batches: list[Batch],
    score: ScoreFunction,
    group: dist.ProcessGroup | None,
    *,
    matching: Matching,
    reference_free: bool,
) -> list[Batch]:
    """The micro-batches of pairs with `Batch.baseline`, as `matching` computes it from all pairs of the step.

    group: of the data-parallel ranks; None for one. reference_free: the reference's log-probabilities are 0.
    """
    scores = score(batches)
    rows = []
    for batch, policy in zip(batches, scores, strict=True):
        assert batch.preference_labels is not None
        reference = torch.zeros_like(policy) if reference_free else reference_logprobs(batch)
        sides = policy[0::2], policy[1::2], reference[0::2], reference[1::2]
        rows.append(torch.stack([*sides, batch.preference_labels[0::2]]))
    all_pairs, begin = _from_all(torch.cat(rows, 1), group)
    real = all_pairs[4] != 0
    baselines = all_pairs.new_zeros(2, all_pairs.shape[1])
    baselines[:, real] = torch.stack(matching(*all_pairs[:4, real]))
    with_baselines = []
    for batch, policy in zip(batches, scores, strict=True):
        end = begin + len(policy) // 2
        with_baselines.append(replace(batch, baseline=baselines[:, begin:end].t().flatten()))
        begin = end
    return with_baselines


def kl_baseline(batches: list[Batch], score: ScoreFunction, group: dist.ProcessGroup | None) -> list[Batch]:
    """The micro-batches of KTO with its KL as `Batch.baseline`: the mean log-ratio of responses to other
    prompts in the whole step, at least 0.

    Raises ValueError where a batch has no such responses (`Batch.kl_batch`).
    """
    others = [batch.kl_batch for batch in batches if batch.kl_batch is not None]
    if len(others) < len(batches):
        raise ValueError("KTO estimates its KL from answers to other prompts, and a batch has none (`Batch.kl_batch`)")
    total = torch.zeros(2, device=batches[0].tokens.device)
    for other, policy in zip(others, score(others), strict=True):
        assert other.preference_labels is not None
        real = (other.preference_labels != 0).float()
        total += torch.stack([((policy - reference_logprobs(other)) * real).sum(), real.sum()])
    if group is not None:
        dist.all_reduce(total, group=group)
    kl = (total[0] / total[1].clamp(min=1.0)).clamp(min=0.0)
    return [
        replace(batch, baseline=kl.expand_as(batch.preference_labels))
        for batch in batches
        if batch.preference_labels is not None
    ]
