"""What a callback may ask of the run that calls it; `megatron.training.Training` has it."""

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
    """The part of an engine (`megatron.training.engine.Engine`) that a callback may use, and what writes the
    samples of a run; all ranks call together."""

    @property
    def stage(self) -> Stage:
        """This rank's layers, with the weights after the last step: take it from the engine each time."""

    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        """This rank's part of every parameter of its stage by layer and name, on CPU; with `master` fp32
        values."""

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches on this rank's device, with what the objective needs of a reference."""

    def forward_only(
        self,
        batches: list[Batch],
        read: Callable[[HeadInput, Batch], Tensor],
        shape: Callable[[Batch], tuple[int, ...]],
    ) -> list[Tensor]:
        """Read something off hidden states and head of each micro-batch, without gradients; the same on every
        pipeline rank."""

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """log p(label) `[batch, seq]` fp32 of each micro-batch, as a step on it computes them."""

    def sharded_weights(self) -> Parts:
        """fp32 values of trained parameters, such that every element of the model is owned by exactly one
        rank."""


class TrainingRun(Protocol):
    """A training run. Every rank has one, and all ranks call its methods together but for `request_stop`,
    `request_save` and `stopping`."""

    @property
    def args(self) -> NeoXArgs:
        """The configuration."""

    @property
    def groups(self) -> ParallelGroups:
        """The process groups, and this rank's place in them."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data."""

    @property
    def engine(self) -> RunEngine:
        """The model under training."""

    @property
    def logger(self) -> logging.Logger:
        """The log of the run; what other ranks than 0 write to it is not shown."""

    @property
    def watchdog(self) -> Watchdog:
        """What ends ranks that stand still: `with run.watchdog.phase("..."):` around what may take
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
        """Files that came with an imported model and go out with it again, by name."""

    def pause(self) -> AbstractContextManager[None]:
        """Stop the clock for what is done within: it is none of the step's time. The step's result is waited
        for, its log line written and its values put into `Step.row` before. May be nested."""

    def inference(self) -> AbstractContextManager[Model]:
        """The model as it is now, to generate and to score with; training goes on as if it had not been."""

    def save_hf_model(self, folder: Path) -> None:
        """Write the model as it is now as the HuggingFace folder `folder`, in the place of an earlier one
        once it is whole."""

    def stopping(self) -> bool:
        """Whether a stop signal has come to this rank, so that what takes long had better be given up."""

    def request_stop(self, reason: str) -> None:
        """End the run, with a checkpoint, one or two steps from now. One rank may ask alone; all stop after
        the same step. reason: for status.json and the log."""

    def request_save(self) -> None:
        """Write a checkpoint one or two steps from now. One rank may ask alone."""
