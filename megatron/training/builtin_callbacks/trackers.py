"""Passes rows of metrics to metrics.jsonl and the trackers."""

from collections.abc import Sequence

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.training.metrics.loggers import MetricLogger, metrics
from megatron.training.run import Training


class Trackers(Callback):
    """Passes each step's row of metrics to the loggers once the row is complete.

    That is when the callbacks before this one have added their values, and the step's values are read from
    the device (`Step.settled`).
    """

    def __init__(self, training: Training, loggers: Sequence[MetricLogger]) -> None:
        self.training, self.loggers = training, loggers
        self._waiting: Step | None = None

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Write the step's row if its values are read; else keep it until `on_settled`."""
        if step.settled:
            self._write(step)
        else:
            self._waiting = step

    def on_settled(self, step: Step) -> None:
        """Write the row of `step`, if its values were not yet read at the end of the step."""
        if self._waiting is step:
            self._waiting = None
            self._write(step)

    def _write(self, step: Step) -> None:
        """Pass the step's row to all loggers, if it has metrics."""
        if metrics(step.row):
            with self.training.loop.stopwatch.pause():
                for target in self.loggers:
                    target.write(step.row)

    def close(self) -> None:
        """Close every logger, which first writes its remaining rows."""
        with self.training.watchdog.phase("closing the loggers"):
            for target in self.loggers:
                target.close()
