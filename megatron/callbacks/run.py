"""The interface between a callback and its run; `megatron.training.Training` has it."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatron.callbacks.step import Parts
from megatron.data import Batch
from megatron.distributed import Watchdog
from megatron.model import Model, Stage
from megatron.mpu import HeadInput, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer


class RunEngine(Protocol):
    """The methods of an engine (`megatron.training.engine.Engine`) that callbacks may call.

    The code that generates a run's samples uses them too. All ranks call each method together.
    """

    @property
    def stage(self) -> Stage:
        """This rank's layers, with the weights after the last step: take it from the engine each time."""

    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        """Returns this rank's part of every parameter of its stage, by layer and name, on the CPU.

        master: return fp32 master values.
        """

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches on this rank's device, with the reference model's outputs that the
        objective needs."""

    def forward_only(
        self,
        batches: list[Batch],
        read: Callable[[HeadInput, Batch], Tensor],
        shape: Callable[[Batch], tuple[int, ...]],
    ) -> list[Tensor]:
        """Returns `read(head, batch)` of each micro-batch, without gradients; the same on every pipeline
        rank.

        read: gets the final hidden states with the output layer. shape: returns the shape of what `read`
        returns.
        """

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) `[batch, seq]` fp32 of each micro-batch, computed as in a training step."""

    def sharded_weights(self) -> Parts:
        """Returns fp32 values of trained parameters, each element of the model on exactly one rank."""


class TrainingRun(Protocol):
    """A training run. Every rank has one.

    All ranks call its methods together, except `request_stop`, `request_save` and `stopping`.
    """

    @property
    def args(self) -> NeoXArgs:
        """The configuration."""

    @property
    def groups(self) -> ParallelGroups:
        """The process groups, and this rank's position in them."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data."""

    @property
    def engine(self) -> RunEngine:
        """The model under training."""

    @property
    def logger(self) -> logging.Logger:
        """The log of the run. It shows only what rank 0 writes."""

    @property
    def watchdog(self) -> Watchdog:
        """Ends ranks that make no progress: put `with run.watchdog.phase("..."):` around work that takes
        minutes."""

    @property
    def iteration(self) -> int:
        """Optimizer steps done."""

    @property
    def consumed_samples(self) -> int:
        """Samples of the training data read so far, by all ranks."""

    @property
    def consumed_tokens(self) -> int:
        """Tokens of the training data read so far, by all ranks."""

    @property
    def companion_files(self) -> Mapping[str, bytes]:
        """The other files of an imported model, by name, which exports of the model include again."""

    def pause(self) -> AbstractContextManager[None]:
        """Excludes the work in a `with` block from the step's time. May be nested.

        On entry it waits for the step's result, writes its log line and puts its values into `Step.row`.
        """

    def inference(self) -> AbstractContextManager[Model]:
        """Gives a `with` block the current model, to generate and score with. Training then continues as if
        the block had not run."""

    def save_hf_model(self, folder: Path) -> None:
        """Write the current model to the HuggingFace folder `folder`. The complete folder replaces an earlier
        one."""

    def stopping(self) -> bool:
        """Returns whether this rank knows of a stop signal; long work should then be abandoned."""

    def request_stop(self, reason: str) -> None:
        """End the run, with a checkpoint, one or two steps from now. One rank may ask alone; all stop after
        the same step. reason: for status.json and the log."""

    def request_save(self) -> None:
        """Write a checkpoint one or two steps from now. One rank may ask alone."""
