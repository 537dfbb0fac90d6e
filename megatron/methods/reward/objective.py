"""The loss of reward models: the chosen response of a pair should have the higher score.

Source: RewardTrainer of TRL 1.16.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.data.preferences.responses import batch_responses
from megatron.mpu import HeadInput
from megatron.objectives.objective import LossSums, Objective
from megatron.objectives.preference import response_scores, sum_and_count

METRICS = ("min_reward", "mean_reward", "max_reward", "accuracy", "pos_values", "neg_values")


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None, center: float, z_loss: float) -> Tensor:
    """Returns the loss of each pair, `[pairs]`: minus the log-probability that the chosen response wins by
    `margin`.

    chosen, rejected: the scores; the probability is a sigmoid of their difference minus the margin. Sources:
    arXiv 2204.05862; margins: arXiv 2307.09288, equation 2.
    center: coefficient of (chosen + rejected)^2 (arXiv 2312.09244).
    z_loss: coefficient of chosen^2 + rejected^2, as in GPT-NeoX.
    """
    gap = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(gap)
    if center:
        loss = loss + center * (chosen + rejected).square()
    return loss + z_loss * (chosen.square() + rejected.square()) if z_loss else loss


def reward(center: float = 0.0, z_loss: float = 0.0) -> Objective:
    """Returns the objective of reward models. The weight of a batch is its number of pairs.

    Metrics have the names of TRL's RewardTrainer and of GPT-NeoX (pos_values, neg_values: mean scores of
    chosen and of rejected responses). As in TRL, min_reward and max_reward of a step are means of the
    micro-batches' lowest and highest scores.
    center, z_loss: as in `bradley_terry`.
    """

    def weight(batch: Batch) -> Tensor:
        return (batch_responses(batch).preference_labels[0::2] != 0).sum().float().view(1)

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        responses = batch_responses(batch)
        scores, real = response_scores(head, batch, group), responses.preference_labels != 0
        chosen, rejected, pairs = scores[0::2], scores[1::2], real[0::2]
        losses = bradley_terry(chosen, rejected, responses.margins, center, z_loss)
        detached = scores.detach()
        lowest = torch.where(real, detached, torch.inf).amin().view(1)
        highest = torch.where(real, detached, -torch.inf).amax().view(1)
        metrics = {
            "min_reward": sum_and_count(lowest, lowest.isfinite()),
            "mean_reward": sum_and_count(scores, real),
            "max_reward": sum_and_count(highest, highest.isfinite()),
            "accuracy": sum_and_count(chosen > rejected, pairs),
            "pos_values": sum_and_count(chosen, pairs),
            "neg_values": sum_and_count(rejected, pairs),
        }
        return torch.where(pairs, losses, 0.0).sum().view(1), metrics

    return Objective(weight, loss_sum, METRICS, {"margin": ("pos_values", "neg_values")})
