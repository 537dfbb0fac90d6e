"""Rollouts without a reward: the run ends where every answer failed, and says which steps teach nothing."""

import logging
from typing import Any

import numpy as np
import pytest

from megatron.methods.reinforcement.judging import failure_of_all
from megatron.methods.reinforcement.rewards.functions import Failure
from tests.methods.reinforcement.test_rollouts import task, with_keys
from tests.methods.reinforcement.toy import rollouts_of, steps_of
from tests.pool import run_ranks
from tests.training.runs import begin

__all__ = ["task"]  # the fixture
NAN = float("nan")


def failures(*rows: int | None) -> list[Failure]:
    return [Failure("f", row, f"of {row}") for row in rows]


@pytest.mark.parametrize(
    ("rows", "rewards", "answers_each", "first_row"),
    [
        ((1, 0), [NAN, NAN], 1, 1),
        ((0, 0), [NAN, NAN], 1, None),
        ((None, 1), [NAN, NAN], 1, None),  # the other one had nobody to judge it
        ((0, 1), [NAN, 0.5], 1, None),
        ((0, 2), [NAN] * 4, 2, 0),
        ((0, 2), [NAN] * 4, 1, None),
    ],
)
def test_all_must_have_failed(rows: Any, rewards: list[float], answers_each: int, first_row: int | None) -> None:
    failure = failure_of_all(failures(*rows), np.array(rewards), answers_each)
    assert (failure and failure.row) == first_row


def with_function(task: dict[str, Any], name: str) -> dict[str, Any]:
    """The task with another of its reward functions, its prompts in their order."""
    functions = [task["reward_functions"][0].replace("wordy", name)]
    return with_keys(task, {"reward_functions": functions, "rollout.shuffle": False})


def test_a_function_that_fails_for_every_answer_ends_the_run(task: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"reward_functions: .*miscounts: .*all 16 .* 0, .*:1: .*17 values for 16"):
        run_ranks(steps_of, 2, with_function(task, "miscounts"))


def test_beside_another_function_it_does_not(task: dict[str, Any]) -> None:
    values = with_function(task, "miscounts")
    run_ranks(steps_of, 1, {**values, "reward_functions": [*values["reward_functions"], *task["reward_functions"]]}, 1)


def warnings_of(rank: int, world_size: int, values: dict[str, Any], steps: int) -> list[str]:
    """For the pool: what some steps of a run warn of."""
    training = begin(values)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    training.logger.addHandler(handler)
    rollouts = rollouts_of(training)
    batches = iter(rollouts)
    for _ in range(steps):
        next(batches)
        training.progress.iteration += 1
    training.logger.removeHandler(handler)
    rollouts.close()
    training.engine.close()
    return warnings


def test_steps_that_teach_nothing_are_counted(task: dict[str, Any]) -> None:
    """Each of two steps on a generation gives one warning; failures of some answers end nothing."""
    changes = {"rollout.steps_per_generation": 2, "rollout.max_completion_length": 1, "rl_mask_truncated": True}
    warnings = run_ranks(warnings_of, 1, with_keys(with_function(task, "silent"), changes), 4)[0]
    unrewarded = [line for line in warnings if "has a reward" in line]
    assert [line.split(": ")[1] for line in unrewarded] == [f"step {step}" for step in range(1, 5)]
    assert all(" 16 answers" in line for line in unrewarded) and "(4 such steps" in unrewarded[-1]
    truncated = [line for line in warnings if "max_completion_length" in line and "rl_mask_truncated" in line]
    assert truncated and len(truncated) <= 4 and " 16 answers" in truncated[0]


def test_other_steps_are_not(task: dict[str, Any]) -> None:
    assert run_ranks(warnings_of, 1, task, 2)[0] == []
