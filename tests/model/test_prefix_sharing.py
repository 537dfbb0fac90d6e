"""Pairs whose prompts are computed once: losses and gradients of those whose prompts stand twice."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.objectives import PairSettings, dpo
from tests.model.stages import gradients, random_weights, small, stage_with
from tests.objectives.cases import PAIRS, documents_of, in_rows, shared_in_rows
from tests.objectives.steps import step_loss

MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary", "rotary_pct": 0.5},
    "window": {"pos_emb": "rotary", "sliding_window_width": 4},
    "alibi": {"pos_emb": "alibi"},
    "rpe": {"pos_emb": "rpe"},
    "learned": {"pos_emb": "learned"},
    "math": {"pos_emb": "rotary", "attention_backend": "math"},
}
LOSSES = ({"sigmoid": 0.5, "sft": 0.3, "aot": 0.2}, {"orpo": 1.0}, {"simpo": 1.0})


def pairs(shared: bool) -> Batch:
    """Two rows of pairs and padding."""
    documents, make = documents_of(PAIRS), shared_in_rows if shared else in_rows
    return make(documents, [[4, 5, 0, 1], [6, 7, 2, 3]], 36 if shared else 48, [1.0] * len(documents) + [0.0] * 2)


def step(model: dict[str, Any], batch: Batch, losses: dict[str, float]) -> tuple[Tensor, dict, dict]:
    args = small(**model, seq_length=batch.tokens.shape[1], max_position_embeddings=64)
    stage = stage_with(args, random_weights(args))
    references = torch.tensor([-20.0 - number for number in range(8)] + [0.0, 0.0])
    batch = replace(batch, reference_logprobs=references)
    loss, metrics = step_loss(dpo(losses, PairSettings(0.3)), lambda each: stage(None, each), [batch])
    loss.backward()
    return loss.detach(), metrics, gradients(stage)


@pytest.mark.parametrize("losses", LOSSES, ids=lambda losses: next(iter(losses)))
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_of_prompts_that_stand_twice(model: str, losses: dict[str, float]) -> None:
    loss, metrics, grads = step(MODELS[model], pairs(True), losses)
    expected, expected_metrics, expected_grads = step(MODELS[model], pairs(False), losses)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert {key: float(value) for key, value in metrics.items()} == pytest.approx(
        {key: float(value) for key, value in expected_metrics.items()}, rel=1e-5, abs=1e-5
    )
    for key, grad in expected_grads.items():
        within = 1e-5 * float(grad.abs().max()) + 1e-7
        torch.testing.assert_close(grads[key], grad, rtol=1e-4, atol=within, msg=str(key))
