"""Saves the best model of a run, by a validation metric, to `<save>/best_model` in HuggingFace's format."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.checkpointing import CheckpointError
from megatron.checkpointing.huggingface import recover
from megatron.data import Datasets
from megatron.distributed import on_rank_zero
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.best_metric import Mode, best_metric
from megatron.neox_arguments.values.json_text import parse_json
from megatron.objectives import Objective
from megatron.training.evaluation import validation_metrics
from megatron.training.run import Training

FOLDER, NOTE = "best_model", "best.json"


@dataclass(frozen=True)
class BestRecord:
    """The content of `best_model/best.json`.

    mode: "min" if a lower value is better, else "max". value: of `metric`, after `iteration` steps of the run
    `run_id`.
    """

    metric: str
    mode: Mode
    value: float
    iteration: int
    run_id: str

    def is_improvement(self, value: float) -> bool:
        """Returns whether `value` is better than this record's value; an equal value is not."""
        return value < self.value if self.mode == "min" else value > self.value


def read_best(folder: Path) -> BestRecord | None:
    """Returns the record in the folder of a best model; None if it has none. Raises CheckpointError if it
    cannot be read."""
    recover(folder)
    file = folder / NOTE
    if not file.is_file():
        return None
    try:
        return BestRecord(**parse_json(file.read_text()))
    except (ValueError, TypeError) as problem:
        raise CheckpointError(f"{file} cannot be read ({problem}); delete the folder {folder}") from problem


def check_best(args: NeoXArgs, objective: Objective, datasets: Datasets) -> None:
    """Raises ConfigError if `save_best` names a metric `validation/...` that this run does not have, or if
    there is no validation data. Metrics of `eval_tasks` are not checked here."""
    if args.save_best is None:
        return
    metric, _ = best_metric(args.save_best)
    if metric.startswith("validation/"):
        valid_metrics = validation_metrics(args, objective)
        if metric not in valid_metrics:
            raise args.error("save_best", f"{metric}: this run has no such metric; it has {', '.join(valid_metrics)}")
        if datasets.valid is None and not datasets.valid_sets:
            raise args.error("save_best", f"{metric}: this run has no validation data; set some, or remove save_best")


class BestModelCallback(Callback):
    """Saves the model after each validation whose metric is better than all earlier ones of this run.

    The validation before the first step does not count, because it is of the model that the run started from.
    """

    def __init__(self, training: Training) -> None:
        self.training, args = training, training.args
        assert args.save_best is not None and args.save_dir is not None
        self.metric, self.mode = best_metric(args.save_best)
        self.folder = Path(args.save_dir) / FOLDER
        # A best model of another run in this folder is replaced, for example after `restart`.
        earlier_best = on_rank_zero(training.groups, lambda: read_best(self.folder))
        is_same_run = earlier_best is not None and (earlier_best.run_id, earlier_best.metric, earlier_best.mode) == (
            training.checkpointer.run_id, self.metric, self.mode
        )  # fmt: skip
        self.best = earlier_best if is_same_run else None

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """Save the model if it is the best so far."""
        training = self.training
        better = on_rank_zero(training.groups, lambda: self._better(step))  # only rank 0 has results of eval_tasks
        if better is None:
            return
        with training.watchdog.phase("saving the best model"):
            note = (json.dumps(asdict(better), indent=1) + "\n").encode()
            training.checkpointer.save_hf_model(self.folder, training.progress, {NOTE: note})
        self.best = better
        text = f"best model so far, by {better.metric} {better.value:.6E} at iteration {better.iteration}"
        training.logger.info(f"{text}: {self.folder}")

    def _better(self, step: Step) -> BestRecord | None:
        value = step.row.get(self.metric)
        if value is None and self.metric.startswith("eval_tasks/"):
            task_metrics = [name for name in step.row if name.startswith("eval_tasks/")]
            if task_metrics:  # else a signal that ends the run interrupted the evaluation
                args, objective = self.training.args, self.training.engine.objective
                metric_names = ", ".join([*validation_metrics(args, objective), *task_metrics])
                raise args.error("save_best", f"{self.metric}: this run has no such metric; it has {metric_names}")
        if value is None or value != value or step.iteration == 0:
            return None
        if self.best is not None and not self.best.is_improvement(value):
            return None
        return BestRecord(self.metric, self.mode, float(value), step.iteration, self.training.run_id)
