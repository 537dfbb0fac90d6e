"""Rows of metrics on their way to metrics.jsonl and the trackers."""

from collections.abc import Sequence

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.distributed import Watchdog
from megatron.training.loop_state import Stopwatch
from megatron.training.metrics.loggers import MetricLogger, metrics


class Trackers(Callback):
    """Hands each step's row to the loggers when it has the step's values and what the callbacks before this
    one add: at once where the step is settled, else when it is."""

    def __init__(self, loggers: Sequence[MetricLogger], stopwatch: Stopwatch, watchdog: Watchdog) -> None:
        self.loggers, self.stopwatch, self.watchdog = loggers, stopwatch, watchdog
        self._waiting: Step | None = None

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Write the row, or wait for the step's values."""
        if step.settled:
            self._write(step)
        else:
            self._waiting = step

    def on_settled(self, step: Step) -> None:
        """Write the row of a step that was waited for."""
        if self._waiting is step:
            self._waiting = None
            self._write(step)

    def _write(self, step: Step) -> None:
        """Hand over a row, if it says more than where the run is."""
        if metrics(step.row):
            with self.stopwatch.pause():
                for target in self.loggers:
                    target.write(step.row)

    def close(self) -> None:
        """Let every logger write what it still holds."""
        with self.watchdog.phase("closing the loggers"):
            for target in self.loggers:
                target.close()
