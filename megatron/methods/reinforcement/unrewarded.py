"""Checks for answers without a reward: generations where every answer failed, and steps that teach
nothing."""

from collections.abc import Sequence

import numpy as np

from megatron.callbacks import TrainingRun
from megatron.methods.reinforcement.answers import Answer
from megatron.methods.reinforcement.keys import ReinforcementKeys
from megatron.methods.reinforcement.rewards import Failure


def failure_of_all(failures: Sequence[Failure], rewards: np.ndarray, answers_each: int = 1) -> Failure | None:
    """Returns the first failure if every answer failed and none has a reward, else None.

    rewards: `[answers]`, NaN for none. answers_each: the number of answers that a failure covers, from its
    row on: two for a pairwise judge."""
    failed = {
        row for failure in failures if failure.row is not None for row in range(failure.row, failure.row + answers_each)
    }
    if not np.isnan(rewards).all() or len(failed) < len(rewards):
        return None
    return next(failure for failure in failures if failure.row is not None)


class EmptySteps:
    """Counts steps whose answers have no reward or were all truncated, and warns of them. Every rank calls
    its methods."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._unrewarded = self._truncated = 0

    def look(self, rewards: Sequence[float], answers: Sequence[Answer]) -> None:
        """Checks the answers of the next step, of all ranks. rewards: NaN for none."""
        keys = ReinforcementKeys.read_from(self.run.args)
        step, number = f"step {self.run.iteration + 1}", len(answers)
        if np.isnan(np.asarray(rewards, np.float64)).all():
            self._unrewarded += 1
            self.run.logger.warning(
                f"rewards: {step}: none of its {number} answers has a reward, so it teaches nothing "
                f"({self._unrewarded} such steps since the start)"
            )
        if not any(answer.finished for answer in answers):
            self._truncated += 1
            options = keys.rollout
            turns = " and rollout.max_turns" if options is not None and options["environment"] is not None else ""
            untrained = "; rl_mask_truncated leaves all out" if keys.rl_mask_truncated else ""
            self.run.logger.warning(
                f"rollout: {step}: all of its {number} answers were cut off before their end{untrained}; is "
                f"rollout.max_completion_length{turns} large enough? ({self._truncated} such steps since the start)"
            )
