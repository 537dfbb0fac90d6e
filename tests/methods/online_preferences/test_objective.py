"""Online DPO against TRL 1.16: from answers and rewards to pairs, loss, gradients, metrics; any split."""

from typing import Any

import numpy as np
import pytest

from megatron.methods.reinforcement.advantages import best_and_worst
from megatron.methods.reinforcement.answers import Answer, as_pairs, batch_of
from megatron.methods.reinforcement.generation import advantages_of, pairs_of, penalties
from megatron.neox_arguments import NeoXArgs
from megatron.objectives.preference import DIFFERENCE
from megatron.training.method import build_objective
from tests.objectives.steps import arrays, assert_step, facts, forward_of, step_loss
from tests.objectives.test_trl import stage_of, tiny_args, with_reference

STORED = facts("trl_online_dpo")
CASES: dict[str, dict[str, Any]] = STORED["cases"]


def args_of(case: dict[str, Any]) -> NeoXArgs:
    rollout = {"prompts": ["prompts.jsonl"], "num_generations": 2, "max_completion_length": STORED["most"]}
    return tiny_args(train_impl="dpo", dataset_impl="online", dpo_loss_type=case["loss_type"], dpo_beta=case["beta"],
                     reward_functions=["rewards.py:right"],
                     rollout={**rollout, "missing_eos_penalty": case["missing_eos_penalty"]})  # fmt: skip


def answers() -> list[Answer]:
    return [Answer(prompt, tokens, [-1.0] * len(tokens), len(tokens) < STORED["most"])
            for prompt, pair in STORED["answers"] for tokens in pair]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_metrics(name: str) -> None:
    case, written = CASES[name], answers()
    args = args_of(case)
    rewards = np.array(STORED["rewards"]).ravel() - penalties(args, written)
    signs = advantages_of(args, rewards, [])
    policy, reference = stage_of("policy"), stage_of("reference")
    for split in (slice(0, 8),), (slice(0, 2), slice(2, 8)):
        batches = [as_pairs(batch_of(written[rows], 20, rewards=rewards[rows], advantages=signs[rows]))
                   for rows in split]  # fmt: skip
        batches, gradient = with_reference(batches, forward_of(reference)), arrays("trl_online_dpo")[name]
        metrics = assert_step(build_objective(args), policy, batches, case["loss"], gradient)
        for key in ("chosen", "rejected", "margins", "accuracies"):
            assert metrics[f"rewards/{key}"] == pytest.approx(case["metrics"][f"rewards/{key}"], rel=2e-5, abs=1e-6)
        assert metrics["logps/chosen"] == pytest.approx(case["metrics"]["logps/chosen"], rel=1e-5)
        assert 0.5 < metrics[DIFFERENCE] < 10.0


def test_a_pair_is_the_best_and_the_worst_that_have_a_reward() -> None:
    nan = np.nan
    groups = np.array([[1.0, 3.0, 2.0, -1.0], [nan, 2.0, 2.0, 1.0], [2.0] * 4, [nan, 2.0, nan, nan], [nan] * 4])
    signs = best_and_worst(groups.ravel(), 4)
    assert signs.reshape(-1, 4).tolist() == [[0, 1, 0, -1], [0, 1, 0, -1], [0] * 4, [0] * 4, [0] * 4]
    assert pairs_of(signs.tolist(), 4) == [1, 3, 5, 7, 8, 9, 12, 13, 16, 17]


def test_answers_without_a_pair_change_nothing() -> None:
    """Neither the loss nor its weight: beside a pair, two answers that are none."""
    case, written = CASES["sigmoid"], answers()
    args = args_of(case)
    policy, reference = stage_of("policy"), stage_of("reference")
    results = []
    for rows, signs in ((slice(0, 2), [1.0, -1.0]), (slice(0, 4), [1.0, -1.0, 0.0, 0.0])):
        batch = as_pairs(batch_of(written[rows], 20, rewards=[0.0] * len(signs), advantages=signs))
        batches = with_reference([batch], forward_of(reference))
        loss, metrics = step_loss(build_objective(args), forward_of(policy), batches)
        results.append({"loss": float(loss.detach()), **{name: float(value) for name, value in metrics.items()}})
    assert results[1] == pytest.approx(results[0], rel=1e-5)
