"""Reads a past or present run: its metrics, configuration, models and batches, by `Run.load(path)`.

Nothing is written into the run's folder but missing index maps of its data, into the `index_cache` there.
"""

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.experiments.errors import RunError
from megatron.experiments.past_run import PastRun

if TYPE_CHECKING:
    import torch

    from megatron.data import Batch
    from megatron.experiments.run_data import RunData
    from megatron.experiments.run_model import TokenModel


class Run(PastRun):
    """A run in its folder `save`. Steps are counted from 1; the checkpoint of step N has seen N steps."""

    @cached_property
    def _data(self) -> dict[int, "RunData"]:
        return {}

    def data(self, step: int) -> "RunData":
        """Returns the training data as the run read it at a step."""
        from megatron.experiments.run_data import open_data

        checkpoint = self.span_of(step).checkpoint
        if checkpoint not in self._data:
            self._data[checkpoint] = open_data(self, checkpoint)
        return self._data[checkpoint]

    def batch(self, step: int) -> "Batch":
        """Returns the batch of a step, all rows of all ranks in one `Batch`, in the order of the samples."""
        return self.data(step).batch(step)

    def model(self, step: int | None = None, device: "str | torch.device" = "cpu") -> "TokenModel":
        """Returns the model of a checkpoint, in evaluation mode, as a module from token ids to logits.

        step: of the checkpoint; None: of the last one. device: such as cuda.
        """
        from megatron.experiments.run_model import load_token_model

        step = max(self.checkpoints) if step is None else step
        if step not in self.checkpoints:
            saved = ", ".join(map(str, self.checkpoints))
            raise RunError(f"{self.path}: no checkpoint of step {step}; it holds steps {saved}")
        return load_token_model(self.path, step, device, logging.getLogger("megatron.experiments"))
