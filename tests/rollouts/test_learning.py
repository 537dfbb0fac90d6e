"""Rewards alone teach a tiny model sums of two digits, by every kind of loss; rewards of other answers teach
nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pool import run_ranks
from tests.rollouts.test_rollouts import with_keys
from tests.rollouts.toy import rewards_of, whole_run, write_task

LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {"rl_loss_type": "grpo"},
    "rloo": {"rl_loss_type": "rloo", "kl_div_beta": 0.01, "kl_impl": "kl", "rl_kl_in_reward": True},
    "reinforce": {"rl_loss_type": "reinforce"},
    "leave one out": {"rl_loss_type": "reinforce", "reinforce_leave_one_out": True},
    "dapo": {"rl_loss_type": "dapo", "rl_epsilon_high": 0.28, "rollout.num_iterations": 2, "train_iters": 120},
    "gspo": {"rl_loss_type": "gspo"},
    "cispo": {"rl_loss_type": "cispo", "rl_epsilon_high": 5.0},
}


def rewards(folder: Path, function: str, keys: dict[str, Any], most: int = 2) -> list[float]:
    """The mean reward of each generation of a run."""
    task = write_task(folder, most)
    values = with_keys(
        task,
        {"num_layers": 1, "train_batch_size": 64, "train_iters": 80, "log_interval": 50, "save": str(folder / "run")},
        {"optimizer": {"type": "Adam", "params": {"lr": 4e-3}}, "checkpoint_factor": 1000},
        {"rollout.num_generations": 8, "rollout.max_completion_length": 1},
        {"reward_functions": [f"{folder / 'rewards.py'}:{function}"], **keys},
    )
    run_ranks(whole_run, 1, values, timeout=240)
    return list(rewards_of(folder / "run" / "logs" / "rollouts.jsonl"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.more if name in ("grpo", "rloo", "reinforce") else pytest.mark.product)
        for name in LEARNERS
    ],
)
def test_rewards_rise(name: str, tmp_path: Path) -> None:
    found = rewards(tmp_path, "right", LEARNERS[name])
    first, last = sum(found[:5]) / 5, sum(found[-10:]) / 10
    assert first < 0.2 and last > 0.8, [round(value, 2) for value in found[::10]]


@pytest.mark.more
def test_rewards_of_other_answers_teach_nothing(tmp_path: Path) -> None:
    """What was right is read from the answers, since the rewards that the run sees are others'."""
    rewards(tmp_path, "shuffled", LEARNERS["grpo"], most=3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "logs" / "rollouts.jsonl").read_text().splitlines()]
    sums = {f"{a} + {b} =": str(a + b) for a in range(3) for b in range(3)}
    right = [line["completion"].split()[:1] == [sums[line["prompt"]]] for line in lines[-640:]]
    assert sum(right) / len(right) < 0.4
