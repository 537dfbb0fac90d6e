"""Computes baselines for losses that compare an example with all examples of the optimizer step.

These losses are AOT, which matches ranks, and KTO, which subtracts a KL. Baselines are computed over all
micro-batches and data-parallel ranks, before the step's forward passes.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import batch_responses, with_responses
from megatron.objectives.objective import ScoreFunction
from megatron.objectives.preference import reference_logprobs

# Maps log-probabilities of all pairs of a step, `[pairs]` each (policy: chosen, rejected; reference: chosen,
# rejected), to the baselines of the chosen and of the rejected responses, `[pairs]` each.
Matching = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _rank_matched(values: Tensor, order: Tensor) -> Tensor:
    """Returns `values` reordered so that its order by size is that of `order`.

    Where `order` has its smallest element the result has the smallest of `values`, and so on.
    """
    return torch.empty_like(values).scatter_(0, order.argsort(stable=True), values.sort().values)


def match_gaps(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Returns AOT's baselines: each pair gets the reference's gap that has the same rank as the policy's gap.

    A gap is log p(chosen) - log p(rejected); ranks are by size among all pairs of the step. All baselines of
    rejected responses are 0.
    """
    gaps = _rank_matched(ref_chosen - ref_rejected, chosen - rejected)
    return gaps, torch.zeros_like(gaps)


def match_sides(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the baselines of aot_unpaired: chosen and rejected responses are matched by rank.

    Each response gets the log-ratio log p - log p_ref that has the same rank among responses of the other
    side.
    """
    chosen_ratio, rejected_ratio = chosen - ref_chosen, rejected - ref_rejected
    return _rank_matched(rejected_ratio, chosen_ratio), _rank_matched(chosen_ratio, rejected_ratio)


def _from_all(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """Gathers the columns of `values` `[k, n]` from all data-parallel ranks; n may differ by rank.

    Returns the columns of all ranks, `[k, sum of n]`, and the index of this rank's first column.
    """
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
    """Returns the micro-batches with `Responses.baseline`, which `matching` computes from all pairs of the
    step.

    score: function that returns the policy's log-probabilities. group: the data-parallel ranks; None for one
        rank.
    reference_free: take 0 for the reference's log-probabilities.
    """
    scores = score(batches)
    rows = []
    for batch, policy in zip(batches, scores, strict=True):
        reference = torch.zeros_like(policy) if reference_free else reference_logprobs(batch)
        sides = policy[0::2], policy[1::2], reference[0::2], reference[1::2]
        rows.append(torch.stack([*sides, batch_responses(batch).preference_labels[0::2]]))
    all_pairs, begin = _from_all(torch.cat(rows, 1), group)
    real = all_pairs[4] != 0
    baselines = all_pairs.new_zeros(2, all_pairs.shape[1])
    baselines[:, real] = torch.stack(matching(*all_pairs[:4, real]))
    with_baselines = []
    for batch, policy in zip(batches, scores, strict=True):
        end = begin + len(policy) // 2
        with_baselines.append(with_responses(batch, baseline=baselines[:, begin:end].t().flatten()))
        begin = end
    return with_baselines


def kl_baseline(batches: list[Batch], score: ScoreFunction, group: dist.ProcessGroup | None) -> list[Batch]:
    """Returns KTO's micro-batches with the step's KL in `Responses.baseline`.

    The KL is the mean log-ratio of policy to reference over the step's mismatched responses
    (`Responses.kl_batch`: answers paired with other prompts), at least 0. Raises ValueError if a batch has
    none of them.
    """
    kl_batches = [kl for batch in batches if (kl := batch_responses(batch).kl_batch) is not None]
    if len(kl_batches) < len(batches):
        raise ValueError(
            "KTO estimates its KL from answers paired with other prompts, but Responses.kl_batch of a micro-batch is "
            "None; collate KTO data with mismatched answers"
        )
    total = torch.zeros(2, device=batches[0].tokens.device)
    for comparison, policy in zip(kl_batches, score(kl_batches), strict=True):
        real = (batch_responses(comparison).preference_labels != 0).float()
        total += torch.stack([((policy - reference_logprobs(comparison)) * real).sum(), real.sum()])
    if group is not None:
        dist.all_reduce(total, group=group)
    mean = (total[0] / total[1].clamp(min=1.0)).clamp(min=0.0)
    return [with_responses(b, baseline=mean.expand_as(batch_responses(b).preference_labels)) for b in batches]
