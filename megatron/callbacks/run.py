"""The interface between a callback and its run, which `megatron.training.Training` has. And a training step
as callbacks see it: its result, which nobody has waited for, and its row of metrics."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatron.data import Batch
from megatron.distributed import Watchdog
from megatron.model import Model, Stage
from megatron.model.pipeline_forward import Read, Shape
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer

Parts = list[tuple[tuple[int, str], Tensor]]
"""((layer, name in the weight map), part of that parameter, any shape, maybe on the host)."""

OnGradients = Callable[[Parts], None]
"""Called between backward and update with this rank's gradients of the full batch.

They are not clipped and without fp16's loss scale. The call must not wait for the device."""


@dataclass(frozen=True)
class StepResult:
    """An engine's report of one optimizer step.

    Tensors are read once the next step has begun. Values that the engine knows without waiting for the device
    may be plain numbers.

    loss: scalar fp32, the mean over the step's weighted tokens or pairs.
    grad_norm: before clipping.
    skipped: the weights are unchanged, because gradients were not finite or the step is `untrained`.
    spike: the update was left out by `skip_step_above_sigma`.
    metrics: means of the objective's metrics; NaN if nothing was counted.
    untrained: none of the step's tokens is trained.
    loss_scale: fp16's after the step; None in other precisions.
    finding: returns a description of the non-finite values that this rank saw. Call it only once the step is
        known to be skipped.
    """

    loss: Tensor
    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    spike: Tensor | bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    untrained: Tensor | bool = False
    loss_scale: Tensor | float | None = None
    finding: Callable[[], str | None] = lambda: None


@dataclass
class Step:
    """One finished optimizer step, or step 0: a fresh run before its first step.

    seq_length: tokens that the step read of each sample.
    result: the engine's report; None if no step was taken, as for step 0.
    row_length: tokens in a row of the step.
    row_tokens: tokens that the run has read in rows of this length; counted only with a curriculum.
    role: the data of the step (`StepData.role`): "forget" if it unlearns, "on_policy" if the student learns
        from text that it wrote.
    row: metrics by name; callbacks add to it.
    settled: the row holds the step's own values.
    """

    iteration: int
    consumed_samples: int
    seq_length: int
    result: StepResult | None
    consumed_tokens: int | None = None  # None: all tokens of the samples
    row_length: int = 0
    row_tokens: int = 0
    role: str = "train"
    row: dict[str, float | int] = field(default_factory=dict)
    settled: bool = True

    def __post_init__(self) -> None:
        self.row["iteration"] = self.iteration
        self.row["consumed_samples"] = self.consumed_samples
        full = self.consumed_samples * self.seq_length
        self.row["consumed_tokens"] = full if self.consumed_tokens is None else self.consumed_tokens


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

    def forward_only(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
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
