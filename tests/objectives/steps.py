"""One optimizer step's loss by the rules of the engine, without an engine."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.model import Stage
from megatron.mpu import HeadInput, OutputLayer, PlainProduct, plain_kernels
from megatron.objectives import Objective, response_sums
from tests.model.stages import gradients

FOLDER = Path(__file__).parents[1] / "data" / "posttrain"  # what other software gave
Forward = Callable[[Batch], Tensor]  # logits [seq, batch, vocab]


def as_head(logits: Tensor) -> HeadInput:
    """Returns a head that gives these logits: their product with ones on the diagonal."""

    def head(hidden_states: Tensor, use: Callable[[Tensor, OutputLayer], Any] | None = None) -> Any:
        if use is None:
            return hidden_states
        weight = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        return use(hidden_states, OutputLayer(weight, PlainProduct(), plain_kernels()))

    return HeadInput(logits, head)


@cache
def facts(name: str) -> dict[str, Any]:
    """Reads the facts in `FOLDER` that a script of this room has stored."""
    return json.loads((FOLDER / f"{name}.json").read_text())


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as archive:
        return dict(archive)


def assert_gradient(stage: Stage, expected: np.ndarray | Tensor) -> None:
    """The gradient of all weights, by layer and name one vector, is the expected one to fp32's rounding."""
    grads, expected = gradients(stage), torch.as_tensor(expected)
    actual = torch.cat([grads[key].flatten() for key in sorted(grads)])
    assert float((actual - expected).norm() / expected.norm()) < 1e-5
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def forward_of(stage: Stage) -> Forward:
    def forward(batch: Batch) -> Tensor:
        logits = stage(None, batch)
        assert isinstance(logits, Tensor)
        return logits

    return forward


@torch.no_grad()
def scores(forward: Forward, batches: list[Batch]) -> list[Tensor]:
    """The answers' log-probabilities, by torch's own log_softmax."""
    sums = []
    for batch in batches:
        logprobs = forward(batch).float().log_softmax(-1).transpose(0, 1)
        sums.append(response_sums(logprobs.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1), batch))
    return sums


def step_loss(objective: Objective, forward: Forward, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    if objective.step_baselines is not None:
        batches = objective.step_baselines(batches, lambda micro_batches: scores(forward, micro_batches), None)
    weight = torch.stack([objective.weight(batch) for batch in batches]).sum(0).clamp(min=1.0)
    loss, total = torch.zeros(()), torch.zeros(len(objective.metrics), 2)
    for batch in batches:
        parts, metrics = objective.loss_sum(as_head(forward(batch)), batch, None)
        loss = loss + (parts / weight).sum()
        objective.add_metrics(total, metrics)
    return loss, objective.means(total)


def assert_step(objective: Objective, stage: Stage, batches: list[Batch], loss: float, gradient: np.ndarray,
                close: float = 1e-12) -> dict[str, float]:  # fmt: skip
    """Loss and gradient of a step are these; its metrics."""
    stage.zero_grad()
    actual, metrics = step_loss(objective, forward_of(stage), batches)
    actual.backward()
    assert float(actual.detach()) == pytest.approx(loss, rel=1e-5, abs=close)
    assert_gradient(stage, gradient)
    return {name: float(value) for name, value in metrics.items()}
