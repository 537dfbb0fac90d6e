"""Evaluates tasks during training, at iteration 0 and every `eval_interval` steps.

The evaluation does not change the training's results.
"""

import time

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.distributed.rank0_driver import run_rank0_driver
from megatron.evaluation.harness import evaluate, load_tasks_on_rank0
from megatron.evaluation.results import EvaluationResults, add_metadata, write
from megatron.model import Model


class InTraining(Callback):
    """Evaluates `eval_tasks` after each validation of a run.

    The constructor, which all ranks call together, loads the tasks. So unknown tasks, or a `save_best` that
    names no metric of the tasks, raise ConfigError before the first step.
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
        """Evaluates the tasks and adds their metrics to the step's row, as `eval_tasks/<task>_<metric>`.

        The geodesic fork uses this name. Raises StopRequested after a stop signal: the evaluation is
        abandoned, so that the checkpoint is saved in time.
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
        """Adds the metrics to the step's row and logs them. With `eval_output_dir` or `eval_log_samples` it
        also writes result files. Only rank 0 calls it."""
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
                model, self._catalogue, results, source=source, iteration=step.iteration, start_date=start_date,
                seconds=seconds, bootstrap=0,
            )  # fmt: skip
            path = write(args, results, f"step{step.iteration}")
            logger.info(f"evaluation results are in {path}")
