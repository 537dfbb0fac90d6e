"""Callbacks that hold a run in a phase. The trainer finds them by this file."""

import time
import traceback

import torch

from megatron.callbacks import Callback
from megatron.evaluation.progress import EvaluationProgress

LONG_S = 600.0


class Slow(Callback):
    """Steps of half a second."""

    def on_step_end(self, run, step):
        time.sleep(0.5)


class Saving(Callback):
    """Does not get on after a checkpoint."""

    def on_save(self, run, step, ephemeral):
        time.sleep(LONG_S)


class Evaluating(Callback):
    """Evaluates for ever, with the harness' progress in the log."""

    def on_validation_end(self, run, step):
        if step.iteration == 0:
            return
        with run.watchdog.phase("evaluating"), EvaluationProgress(run.logger, 0.5) as progress:
            progress.expect(1000)
            progress.update(450)
            time.sleep(LONG_S)


class Complaining(Callback):
    """Writes a traceback, and neither ends nor goes on."""

    def on_step_end(self, run, step):
        if step.iteration == 3:
            try:
                raise RuntimeError("a kernel hangs")
            except RuntimeError:
                traceback.print_exc()
            time.sleep(LONG_S)


class Greedy(Callback):
    """Asks for more memory than there is."""

    def on_step_end(self, run, step):
        if step.iteration == 3:
            torch.empty(2**50, dtype=torch.uint8)
