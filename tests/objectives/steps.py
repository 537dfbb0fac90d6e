"""One optimizer step's loss by the rules of the engine, without an engine."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, OutputLayer, PlainProduct, plain_kernels
from megatron.objectives import Objective, response_sums

Forward = Callable[[Batch], Tensor]  # logits [seq, batch, vocab]


def as_head(logits: Tensor) -> HeadInput:
    """What gives these logits: their product with ones on the diagonal."""

    def head(hidden_states: Tensor, use: Callable[[Tensor, OutputLayer], Any] | None = None) -> Any:
        if use is None:
            return hidden_states
        weight = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        return use(hidden_states, OutputLayer(weight, PlainProduct(), plain_kernels()))

    return HeadInput(logits, head)


@torch.no_grad()
def scores(forward: Forward, batches: list[Batch]) -> list[Tensor]:
    """The answers' log-probabilities, by torch's own log_softmax."""
    sums = []
    for batch in batches:
        logprobs = forward(batch).float().log_softmax(-1).transpose(0, 1)
        sums.append(response_sums(logprobs.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1), batch))
    return sums


def step_loss(objective: Objective, forward: Forward, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (with its graph) and metrics."""
    if objective.step_baselines is not None:
        batches = objective.step_baselines(batches, lambda asked: scores(forward, asked), None)
    weight = torch.stack([objective.weight(batch) for batch in batches]).sum(0).clamp(min=1.0)
    loss, total = torch.zeros(()), torch.zeros(len(objective.metrics), 2)
    for batch in batches:
        parts, metrics = objective.loss_sum(as_head(forward(batch)), batch, None)
        loss = loss + (parts / weight).sum()
        objective.add_metrics(total, metrics)
    return loss, objective.means(total)
