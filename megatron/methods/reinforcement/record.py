"""Records rollouts: writes one line per answer to `rollouts.jsonl`, and adds metrics to logged steps."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.data import DataError
from megatron.distributed import on_rank_zero
from megatron.methods.reinforcement.advantages import HISTORY, deviation, groups_without_signal
from megatron.methods.reinforcement.answers import Answer
from megatron.methods.reinforcement.generation import Generation
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_keys, rollout_servers
from megatron.methods.reinforcement.rewards.functions import Scores
from megatron.methods.reinforcement.sampler import AnswerRequest
from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.values.losses import writes_pairs
from megatron.objectives.preference import DIFFERENCE
from megatron.process import run_files
from megatron.process.metrics_file import ROLLOUTS_FILE, JsonlLogger, read_lines_backwards

_LOGGED_FAILURES = 3  # failures per generation that the log shows; rollouts.jsonl has all


class LogprobDifferenceError(UserError):
    """Raised if sampler and trainer give the same answers too different log-probabilities
    (`rollout.logprob_bound`)."""


class RolloutRecord(Callback):
    """Records a run's answers in `rollouts.jsonl` and in the metrics of steps.

    history: the latest rewards, oldest first. saved: the steps after which this process wrote checkpoints,
        and the step it resumed from.
    """

    def __init__(self, run: TrainingRun, folder: Path | None, run_id: str, text_of: Callable[[Answer], str]) -> None:
        """Opens `rollouts.jsonl` in `folder`; with None nothing is written. text_of: returns the text of an
        answer.

        Raises DataError if the run resumes and needs earlier rewards, but the file is missing.
        """
        keys = ReinforcementKeys.read_from(run.args)
        self.run, self.text_of, self.saved = run, text_of, [run.iteration]
        self._file: JsonlLogger | None = None

        def open_file() -> list[float]:
            if folder is None:
                return []
            path = folder / ROLLOUTS_FILE
            averaged = run.args.train_impl == "reinforce" and keys.rl_loss_type == "reinforce"
            if run.iteration > 0 and averaged and not path.is_file():
                raise DataError(
                    f"{path}: missing; rl_loss_type: reinforce computes its baseline from the latest rewards, which a "
                    "resumed run reads from this file; restore it, or set log_dir to its folder"
                )
            self._file = JsonlLogger(path, run.iteration, run_id)
            problems = run_files.Problems()
            lines = read_lines_backwards(path, problems)
            shape = {"reward": run_files.number}
            rows = (run_files.fields_of(row, shape, partial(problems.note, path)) for _, row in lines)
            backwards = (row["reward"] for row in rows if row.get("reward") is not None)
            rewards = list(itertools.islice(backwards, HISTORY))[::-1]
            for line in problems.lines():
                run.logger.warning(line)
            return rewards

        self.history: list[float] = on_rank_zero(run.groups, open_file)
        self._answering = "waiting" if rollout_servers(run.args) else "sampling"  # name of the time for answers
        self._seconds = {self._answering: 0.0, "judging": 0.0}  # since the last row of metrics
        self._rows: list[dict[str, float]] = []  # metrics of each generation since the last row
        self._last_row_at = time.perf_counter()

    def take(
        self,
        generation: Generation,
        requests: Sequence[AnswerRequest],
        scores: Scores,
        penalised: np.ndarray,
        sampling_s: float,
        judging_s: float,
    ) -> None:
        """Records a generation of answers.

        penalised: rewards minus penalties for length and KL. sampling_s: seconds until all answers were
            there, including the wait for servers. judging_s: seconds to judge them.
        """
        self._seconds[self._answering] += sampling_s
        self._seconds["judging"] += judging_s
        self._rows.append(self._metrics(generation, scores, penalised))
        self.history = [*self.history, *(value for value in penalised.tolist() if not math.isnan(value))][-HISTORY:]
        for failure in scores.failures[:_LOGGED_FAILURES]:
            place = "" if failure.row is None else f"{requests[failure.row][0].row.place}: "
            self.run.logger.warning(f"rewards: {failure.function}: {place}{failure.reason}")
        if len(scores.failures) > _LOGGED_FAILURES:
            self.run.logger.warning(
                f"rewards: {len(scores.failures)} failures to judge answers in this generation; {ROLLOUTS_FILE} has all"
            )
        if self._file is not None:
            self._write(self._file, generation, requests, scores, penalised)

    def _write(
        self,
        file: JsonlLogger,
        generation: Generation,
        requests: Sequence[AnswerRequest],
        scores: Scores,
        penalised: np.ndarray,
    ) -> None:
        failed: dict[int, dict[str, str]] = {}
        for failure in scores.failures:
            if failure.row is not None:
                failed.setdefault(failure.row, {})[failure.function] = failure.reason
        for row, ((prompt, number), answer) in enumerate(zip(requests, generation.answers, strict=True)):
            total = float(penalised[row])
            file.write(
                {
                    "iteration": self.run.iteration + 1, "generation": generation.number,
                    "weights": generation.weights,
                    "prompt": prompt.row.prompt if answer.transcript is None else answer.transcript.prompt,
                    "place": prompt.row.place, "answer": number, "completion": self.text_of(answer),
                    "prompt_tokens": len(answer.prompt), "tokens": answer.tokens, "finished": answer.finished,
                    **_conversation_fields(answer),
                    "reward": None if math.isnan(total) else total,
                    "rewards": {name: values[row] for name, values in scores.parts.items()},
                    "advantage": generation.advantages[row],
                    **({"failures": failed[row]} if row in failed else {}),
                }
            )  # fmt: skip

    def _metrics(self, generation: Generation, scores: Scores, penalised: np.ndarray) -> dict[str, float]:
        group = rollout_keys(self.run.args)["num_generations"]
        lengths = [answer.length for answer in generation.answers]
        metrics = {
            "reward_std": _spread(generation.rewards),
            "frac_reward_zero_std": (
                float(np.mean(~np.array(generation.advantages).reshape(-1, group).any(1)))
                if writes_pairs(self.run.args)
                else groups_without_signal(penalised, group)
            ),
            "rewards/failures": float(len(scores.failures)),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/min_length": float(min(lengths)),
            "completions/max_length": float(max(lengths)),
            "completions/clipped_ratio": float(np.mean([not answer.finished for answer in generation.answers])),
        }
        turns = [answer.transcript.turns for answer in generation.answers if answer.transcript is not None]
        if turns:
            metrics["completions/mean_turns"] = float(np.mean(turns))
        if writes_pairs(self.run.args):
            signs = np.array(generation.advantages)
            metrics["reward"] = float(np.nanmean(penalised)) if not np.isnan(penalised).all() else math.nan
            margins = (penalised[signs > 0] - penalised[signs < 0]).tolist()
            metrics["reward_margin"] = float(np.mean(margins)) if margins else math.nan
        for name, values in scores.parts.items():
            numbers = [value for value in values if value is not None]
            metrics[f"rewards/{name}/mean"] = float(np.mean(numbers)) if numbers else math.nan
            metrics[f"rewards/{name}/std"] = _spread(numbers)
        return metrics

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Checks that sampler and trainer agree on log-probabilities, and adds metrics to the row of a logged
        step.

        Metrics are means over the steps since the last logged one. Raises LogprobDifferenceError if the two
        disagree.
        """
        if step.result is None:
            return
        options = rollout_keys(run.args)
        bound = options["logprob_bound"]
        num_steps = (step.iteration - 1) % (options["steps_per_generation"] * options["num_iterations"])
        if bound and not (num_steps and writes_pairs(run.args)):  # online DPO's later steps have changed weights
            difference = float(step.result.metrics[DIFFERENCE])  # sampling waits for the step anyway
            if difference > bound:  # NaN: no token of the step is trained
                raise LogprobDifferenceError(
                    f"step {step.iteration}: the log-probabilities of sampler and trainer differ by {difference:.4g} "
                    f"per token on average, more than rollout.logprob_bound {bound:g}: the sampler has other weights "
                    "(stale ones?) or another precision than the trainer; this step is in no checkpoint"
                )
        if step.iteration % run.args.log_interval:
            return
        now = time.perf_counter()
        elapsed, self._last_row_at = max(now - self._last_row_at, 1e-9), now
        shares = {name: seconds / elapsed for name, seconds in self._seconds.items()}
        row = {f"time/{name}_share": share for name, share in shares.items()}
        row["time/training_share"] = max(0.0, 1.0 - sum(shares.values()))
        row |= _means(self._rows)
        step.row.update({f"train/{name}": value for name, value in row.items() if not math.isnan(value)})
        self._rows, self._seconds = [], dict.fromkeys(self._seconds, 0.0)

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Notes the step of a saved checkpoint: a later start may resume from it."""
        self.saved.append(step.iteration)

    def close(self) -> None:
        """Closes `rollouts.jsonl`."""
        if self._file is not None:
            self._file.close()


def _conversation_fields(answer: Answer) -> dict[str, Any]:
    """Returns the fields that a line of `rollouts.jsonl` has only for conversations: messages and loss_mask.

    loss_mask: 1 for each token that the model wrote, else 0.
    """
    if answer.transcript is None or answer.loss_mask is None:
        return {}
    return {"messages": answer.transcript.messages, "loss_mask": [int(from_model) for from_model in answer.loss_mask]}


def _spread(values: Sequence[float]) -> float:
    return float(deviation(np.asarray(values, np.float64))[0])


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if not math.isnan(row.get(name, math.nan))] for name in names}
    return {name: float(np.mean(numbers)) for name, numbers in values.items() if numbers}


class EmptySteps:
    """Warns of steps in which no answer has a reward, or all answers were truncated, and counts them.

    All ranks must call its methods together.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._unrewarded = self._truncated = 0

    def look(self, rewards: Sequence[float], answers: Sequence[Answer]) -> None:
        """Checks the answers of the next step, over all ranks. rewards: one per answer, NaN for none."""
        args, step, number = self.run.args, f"step {self.run.iteration + 1}", len(answers)
        if np.isnan(np.asarray(rewards, np.float64)).all():
            self._unrewarded += 1
            self.run.logger.warning(
                f"rewards: {step}: none of its {number} answers has a reward, so the step teaches nothing "
                f"({self._unrewarded} such steps since the start)"
            )
        if not any(answer.finished for answer in answers):
            self._truncated += 1
            turns = " and rollout.max_turns" if rollout_keys(args)["environment"] is not None else ""
            mask_truncated = ReinforcementKeys.read_from(args).rl_mask_truncated
            untrained = ", and rl_mask_truncated excludes them all from training" if mask_truncated else ""
            self.run.logger.warning(
                f"rollout: {step}: all of its {number} answers were truncated{untrained}; raise "
                f"rollout.max_completion_length{turns} ({self._truncated} such steps since the start)"
            )
