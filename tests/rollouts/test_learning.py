"""Rewards alone teach a tiny model sums of two digits, by every kind of loss."""

from pathlib import Path
from typing import Any

import pytest

from tests.marks import with_more
from tests.rollouts.test_rollouts import with_keys
from tests.rollouts.toy import LEARNS, is_right, learned, write_task

LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {"rl_loss_type": "grpo"},
    "rloo": {"rl_loss_type": "rloo", "kl_div_beta": 0.01, "kl_impl": "kl", "rl_kl_in_reward": True},
    "reinforce": {"rl_loss_type": "reinforce"},
    "leave one out": {"rl_loss_type": "reinforce", "reinforce_leave_one_out": True},
    "dapo": {"rl_loss_type": "dapo", "rl_epsilon_high": 0.28, "rollout.num_iterations": 2, "train_iters": 120},
    "gspo": {"rl_loss_type": "gspo"}, "cispo": {"rl_loss_type": "cispo", "rl_epsilon_high": 5.0},
}  # fmt: skip


@pytest.mark.parametrize("name", with_more(LEARNERS, "grpo", product=LEARNERS.keys() - {"grpo"}))
def test_right_answers_become_more(name: str, tmp_path: Path) -> None:
    """Than in a control of the same seed, whose rewards are those of other answers; what is right is read
    from the answers, since the rewards that the control sees are others'."""
    after = {}
    for function in ("right", "shuffled"):
        (folder := tmp_path / function).mkdir()
        own = {"rollout.num_generations": 8, "rollout.max_completion_length": 1}
        own |= {"reward_functions": [f"{folder / 'rewards.py'}:{function}"], **LEARNERS[name]}
        _, after[function] = learned(with_keys(write_task(folder, 3), LEARNS, own), folder / "run", is_right)
    # Seen of grpo: 0.76 and 0.04
    assert after["right"] > after["shuffled"] + (0.5 if name == "grpo" else 0.3), after
