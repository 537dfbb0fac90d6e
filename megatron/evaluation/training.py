"""Evaluation in the middle of a run: at iteration 0 and every `eval_interval`, without a trace in the
training."""

import time
from pathlib import Path
from typing import Any

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.distributed.rank0_driver import run_rank0_driver
from megatron.evaluation.harness import EvaluationResults, evaluate, load_tasks_on_rank0
from megatron.model import Model


class InTraining(Callback):
    """Evaluates `eval_tasks` after each validation of a run. Tasks are looked up once, when it is made, on
    all ranks together: what is no task, and a `save_best` that no task has, is refused before the first step
    (ConfigError)."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._machine: dict[str, Any] = {}  # on rank 0, once it is asked for
        with run.watchdog.phase("loading the evaluation tasks"):
            self._catalogue = load_tasks_on_rank0(run.args, run.groups, run.tokenizer, run.logger, self._beat)
            run_rank0_driver(run.groups, lambda call: self._check_best(), {}, on_beat=self._beat)

    def _check_best(self) -> None:
        from megatron.evaluation.task_loading import check_best_metric

        assert self._catalogue is not None
        check_best_metric(self.run.args, self._catalogue)

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """Evaluate, with metrics named `eval_tasks/<task>_<metric>` (the fork's name). Raises StopRequested:
        what is under way when a signal ends the run is given up, so that the checkpoint is not late."""
        begun = time.time()
        with run.watchdog.phase("evaluating"), run.inference() as model:
            results = evaluate(model, self._catalogue, run.logger, on_beat=self._beat)
            run_rank0_driver(run.groups, lambda call: self._tell(step, model, results, begun), {}, on_beat=self._beat)

    def _beat(self) -> None:
        self.run.watchdog.now("evaluating")

    def _tell(self, step: Step, model: Model, found: EvaluationResults | None, begun: float) -> None:
        """On rank 0: metrics, a line, and the files if they are asked for."""
        args, logger = self.run.args, self.run.logger
        assert found is not None
        row = {f"eval_tasks/{name}": value for name, value in found.metrics().items()}
        step.row.update(row)
        shown = " | ".join(f"{name}: {value:.6g}" for name, value in row.items() if "_stderr" not in name)
        logger.info(f" evaluation results at iteration {step.iteration} | {shown or 'no task could be run'}")
        if args.eval_output_dir is not None or args.eval_log_samples:
            from megatron.evaluation.metadata import add_metadata, machine_info
            from megatron.evaluation.results import write

            assert self._catalogue is not None
            self._machine = self._machine or machine_info()
            run_info: Any = {"source": str(args.save or ""), "begun": begun, "seconds": time.time() - begun}
            add_metadata(model, self._catalogue, found, self._machine, **run_info, bootstrap=0)
            path: Path = write(args, found, f"step{step.iteration}")
            logger.info(f"evaluation results are in {path}")
