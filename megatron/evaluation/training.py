"""Evaluation during training: at iteration 0 and every `eval_interval`. It does not change the training's
results."""

import time

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.distributed.rank0_driver import run_rank0_driver
from megatron.evaluation.harness import evaluate, load_tasks_on_rank0
from megatron.evaluation.results import EvaluationResults, add_metadata, write
from megatron.model import Model


class InTraining(Callback):
    """Evaluates `eval_tasks` after each validation of a run.

    Creating it loads the tasks, on all ranks together. It raises ConfigError before the first step for
    unknown tasks, and for a `save_best` that names no metric of the tasks.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        with run.watchdog.phase("loading the evaluation tasks"):
            self._catalogue = load_tasks_on_rank0(run.args, run.groups, run.tokenizer, run.logger, self._beat)
            run_rank0_driver(run.groups, lambda call: self._check_best(), {}, on_beat=self._beat)

    def _check_best(self) -> None:
        from megatron.evaluation.task_loading import check_best_metric

        assert self._catalogue is not None
        check_best_metric(self.run.args, self._catalogue)

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """Evaluates, and adds metrics named `eval_tasks/<task>_<metric>` (the fork's name) to the step's row.

        Raises StopRequested after a stop signal: the evaluation is abandoned so that the checkpoint is saved
        in time.
        """
        start_date = time.time()
        with run.watchdog.phase("evaluating"), run.inference() as model:
            results = evaluate(model, self._catalogue, run.logger, on_beat=self._beat)
            run_rank0_driver(
                run.groups, lambda call: self._tell(step, model, results, start_date), {}, on_beat=self._beat
            )

    def _beat(self) -> None:
        self.run.watchdog.now("evaluating")

    def _tell(self, step: Step, model: Model, results: EvaluationResults | None, start_date: float) -> None:
        """On rank 0, adds the metrics to the step's row, logs a line, and writes result files if the
        configuration asks for them."""
        args, logger = self.run.args, self.run.logger
        assert results is not None
        row = {f"eval_tasks/{name}": value for name, value in results.metrics().items()}
        step.row.update(row)
        scores = " | ".join(f"{name}: {value:.6g}" for name, value in row.items() if "_stderr" not in name)
        logger.info(f" evaluation results at iteration {step.iteration} | {scores or 'no task could be run'}")
        if args.eval_output_dir is not None or args.eval_log_samples:
            assert self._catalogue is not None
            seconds, source = time.time() - start_date, str(args.save or "")
            add_metadata(
                model, self._catalogue, results, source=source, start_date=start_date, seconds=seconds, bootstrap=0
            )
            path = write(args, results, f"step{step.iteration}")
            logger.info(f"evaluation results are in {path}")
