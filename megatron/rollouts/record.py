"""What is kept of rollouts: `rollouts.jsonl`, a line an answer, and the metrics of steps."""

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
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.values.losses import writes_pairs
from megatron.neox_arguments.values.rollouts import rollout_servers
from megatron.objectives.advantages import HISTORY, deviation, groups_without_signal
from megatron.objectives.preference import DIFFERENCE
from megatron.process import run_files
from megatron.process.metrics_file import ROLLOUTS_FILE, JsonlLogger, read_lines_backwards
from megatron.rollouts.answers import Answer
from megatron.rollouts.generation import Generation
from megatron.rollouts.rewards import Scores
from megatron.rollouts.sampler import Asked

_FAILURES_SAID = 3  # of a generation, in the log; all are in the file


class LogprobDifferenceError(UserError):
    """Sampler and trainer do not give the same answers the same log-probabilities."""


class RolloutRecord(Callback):
    """The record of a run's rollouts. history: the last rewards, in order; saved: the steps after which this
    start has written a checkpoint, and that which it goes on from."""

    def __init__(self, run: TrainingRun, folder: Path | None, run_id: str, text_of: Callable[[Answer], str]) -> None:
        """folder: of `rollouts.jsonl`; None: nothing is written."""
        self.run, self.text_of, self.saved = run, text_of, [run.iteration]
        self._file: JsonlLogger | None = None

        def open_file() -> list[float]:
            if folder is None:
                return []
            path = folder / ROLLOUTS_FILE
            averaged = run.args.train_impl == "reinforce" and run.args.rl_loss_type == "reinforce"
            if run.iteration > 0 and averaged and not path.is_file():
                raise DataError(f"{path}: missing; rl_loss_type reinforce goes on with the rewards that it held")
            self._file = JsonlLogger(path, run.iteration, run_id)
            problems = run_files.Problems()
            lines = read_lines_backwards(path, problems)
            shape = {"reward": run_files.number}
            rows = (run_files.fields_of(row, shape, partial(problems.note, path)) for _, row in lines)
            backwards = (row["reward"] for row in rows if row.get("reward") is not None)
            found = list(itertools.islice(backwards, HISTORY))[::-1]
            for line in problems.lines():
                run.logger.warning(line)
            return found

        self.history: list[float] = on_rank_zero(run.groups, open_file)
        self._answering = "waiting" if rollout_servers(run.args) else "sampling"  # what the ranks do meanwhile
        self._seconds = {self._answering: 0.0, "judging": 0.0}  # since the last row of metrics
        self._rows: list[dict[str, float]] = []  # of the generations since then
        self._since = time.perf_counter()

    def take(
        self,
        generation: Generation,
        asked: Sequence[Asked],
        scores: Scores,
        penalised: np.ndarray,
        sampling_s: float,
        judging_s: float,
    ) -> None:
        """Note a generation. penalised: its rewards less what the KL takes of them. sampling_s: until the
        answers were there, with servers too."""
        self._seconds[self._answering] += sampling_s
        self._seconds["judging"] += judging_s
        self._rows.append(self._metrics(generation, scores, penalised))
        self.history = [*self.history, *(value for value in penalised.tolist() if not math.isnan(value))][-HISTORY:]
        for failure in scores.failures[:_FAILURES_SAID]:
            place = "" if failure.row is None else f"{asked[failure.row][0].row.place}: "
            self.run.logger.warning(f"rewards: {failure.function}: {place}{failure.reason}")
        if len(scores.failures) > _FAILURES_SAID:
            self.run.logger.warning(f"rewards: {len(scores.failures)} failures in all, see {ROLLOUTS_FILE}")
        if self._file is not None:
            self._write(self._file, generation, asked, scores, penalised)

    def _write(
        self, file: JsonlLogger, generation: Generation, asked: Sequence[Asked], scores: Scores, penalised: np.ndarray
    ) -> None:
        failed: dict[int, dict[str, str]] = {}
        for failure in scores.failures:
            if failure.row is not None:
                failed.setdefault(failure.row, {})[failure.function] = failure.reason
        for row, ((prompt, number), answer) in enumerate(zip(asked, generation.answers, strict=True)):
            total = float(penalised[row])
            file.write(
                {
                    "iteration": self.run.iteration + 1, "generation": generation.number,
                    "weights": generation.weights,
                    "prompt": prompt.row.prompt if answer.transcript is None else answer.transcript.prompt,
                    "place": prompt.row.place, "answer": number, "completion": self.text_of(answer),
                    "prompt_tokens": len(answer.prompt), "tokens": answer.tokens, "finished": answer.finished,
                    **_said(answer),
                    "reward": None if math.isnan(total) else total,
                    "rewards": {name: values[row] for name, values in scores.parts.items()},
                    "advantage": generation.advantages[row],
                    **({"failures": failed[row]} if row in failed else {}),
                }
            )  # fmt: skip

    def _metrics(self, generation: Generation, scores: Scores, penalised: np.ndarray) -> dict[str, float]:
        assert self.run.args.rollout is not None
        group = self.run.args.rollout["num_generations"]
        lengths = [answer.length for answer in generation.answers]
        found = {
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
            found["completions/mean_turns"] = float(np.mean(turns))
        if writes_pairs(self.run.args):
            signs = np.array(generation.advantages)
            found["reward"] = float(np.nanmean(penalised)) if not np.isnan(penalised).all() else math.nan
            margins = (penalised[signs > 0] - penalised[signs < 0]).tolist()
            found["reward_margin"] = float(np.mean(margins)) if margins else math.nan
        for name, values in scores.parts.items():
            there = [value for value in values if value is not None]
            found[f"rewards/{name}/mean"] = float(np.mean(there)) if there else math.nan
            found[f"rewards/{name}/std"] = _spread(there)
        return found

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Check the difference of log-probabilities, and add to the row of a logged step the means since the
        last one. Raises LogprobDifferenceError."""
        if step.result is None:
            return
        options = run.args.rollout
        assert options is not None
        bound = options["logprob_bound"]
        later = (step.iteration - 1) % (options["steps_per_generation"] * options["num_iterations"])
        if bound and not (later and writes_pairs(run.args)):  # of pairs it has what was learned from them since
            difference = float(step.result.metrics[DIFFERENCE])  # sampling waits for the step anyway
            if difference > bound:  # NaN: no token of the step is trained
                raise LogprobDifferenceError(
                    f"step {step.iteration}: the log-probabilities of sampler and trainer differ by {difference:.4g} a "
                    f"token, more than rollout.logprob_bound {bound:g}: the answers are not this model's (stale or "
                    "other weights, another precision?); the last checkpoint is of before"
                )
        if step.iteration % run.args.log_interval:
            return
        now = time.perf_counter()
        elapsed, self._since = max(now - self._since, 1e-9), now
        shares = {name: seconds / elapsed for name, seconds in self._seconds.items()}
        row = {f"time/{name}_share": share for name, share in shares.items()}
        row["time/training_share"] = max(0.0, 1.0 - sum(shares.values()))
        row |= _means(self._rows)
        step.row.update({f"train/{name}": value for name, value in row.items() if not math.isnan(value)})
        self._rows, self._seconds = [], dict.fromkeys(self._seconds, 0.0)

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Note the step: another start may go on from it."""
        self.saved.append(step.iteration)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _said(answer: Answer) -> dict[str, Any]:
    """What a conversation has beside an answer; loss_mask: of the tokens, 1 for those that the model
    wrote."""
    if answer.transcript is None or answer.loss_mask is None:
        return {}
    return {"messages": answer.transcript.messages, "loss_mask": [int(by_model) for by_model in answer.loss_mask]}


def judged_by(args: NeoXArgs) -> str:
    """The key that names what judges answers."""
    assert args.rollout is not None
    return "reward_functions" if args.rollout["judge"] is None else "rollout.judge"


def _spread(values: Sequence[float]) -> float:
    return float(deviation(np.asarray(values, np.float64))[0])


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if not math.isnan(row.get(name, math.nan))] for name in names}
    return {name: float(np.mean(of)) for name, of in values.items() if of}
