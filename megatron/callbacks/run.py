"""Defines how a callback sees its run (`TrainingRun`) and a finished training step (`Step`, `StepResult`).

`megatron.training.Training` implements `TrainingRun`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
"""Parts of parameters, or of their gradients: a list of ((layer, parameter name), tensor).

The name is the one in the weight map. The tensor holds some of the parameter's elements, in any shape, on the
GPU or the CPU.
"""

OnGradients = Callable[[Parts], None]
"""A function that is called after the backward pass and before the update, with this rank's gradients.

They are the gradients of the full batch, before clipping, with fp16's loss scale divided out. The function
must not wait for the GPU.
"""


@dataclass(frozen=True)
class StepResult:
    """The engine's report of one optimizer step.

    Read tensors only once the next step has begun, since reading them waits for the GPU. Values that the
    engine knows already may be plain numbers instead of tensors.

    loss: scalar fp32, the mean over the step's trained tokens or pairs.
    grad_norm: norm of the gradients before clipping.
    skipped: the weights were not updated, because gradients were not finite or no token of the step is
        trained.
    spike: the weights were not updated, because `skip_step_above_sigma` found an outlier.
    metrics: means of the objective's metrics; NaN for a metric that no example counted for.
    untrained: no token of the step is trained.
    loss_scale: fp16's loss scale after the step; None in other precisions.
    finding: function that returns a description of the non-finite values that this rank saw. Call it only
        once the step is known to be skipped.
    row_losses: on the last pipeline stage, the summed loss of each row of this rank's micro-batches, each
        `[batch]`; empty if the objective does not keep them.
    """

    loss: Tensor
    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    spike: Tensor | bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    untrained: Tensor | bool = False
    loss_scale: Tensor | float | None = None
    finding: Callable[[], str | None] = lambda: None
    row_losses: Sequence[Tensor] = ()


@dataclass
class Step:
    """One finished optimizer step. Step 0 is the state of a fresh run before its first step.

    seq_length: tokens that the step read of each sample.
    result: the engine's report; None if no optimizer step was taken, as for step 0.
    row_length: tokens in a row of the step's batches.
    row_tokens: tokens that the run has read so far in rows of this length; counted only with a curriculum.
    role: kind of data (`StepData.role`): "train", "forget" if the step unlearns, or "on_policy" if the
        student learns from its own text.
    row: metrics by name; callbacks may add metrics.
    settled: `row` holds the step's own values already; False while the GPU may still be computing them.
    """

    iteration: int
    consumed_samples: int
    seq_length: int
    result: StepResult | None
    consumed_tokens: int | None = None  # None: seq_length tokens of every sample
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
    """The methods of the training engine (`megatron.training.engine.Engine`) that callbacks may call.

    Code that samples training data from the model uses them too. All ranks must call each method together.
    """

    @property
    def stage(self) -> Stage:
        """This rank's pipeline stage, with the weights after the last step. Do not keep it: read it again
        after each step."""

    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        """Returns this rank's shard of every parameter of its pipeline stage, by layer and name, on the CPU.

        master: return the fp32 master values.
        """

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches on this rank's device, with the reference model's outputs that the loss
        needs."""

    def forward_only(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
        """Runs the model on micro-batches without gradients, and returns `read(head, batch)` for each of
        them.

        All pipeline ranks get the same results.
        read: function of the output layer with its final hidden states, and of the micro-batch.
        shape: function from a micro-batch to the shape of the tensor that `read` returns.
        """

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) of each micro-batch, `[batch, seq]` fp32, computed as in a training step."""

    def sharded_weights(self) -> Parts:
        """Returns fp32 values of the trained parameters. Each element of the model is on exactly one rank."""


class TrainingRun(Protocol):
    """Interface of a training run for callbacks. Every rank has one object.

    All ranks must call its methods together, except `request_stop`, `request_save` and `stopping`.
    """

    @property
    def args(self) -> NeoXArgs:
        """The configuration of the run."""

    @property
    def groups(self) -> ParallelGroups:
        """The process groups of the parallel layout, and this rank's position in them."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training data."""

    @property
    def engine(self) -> RunEngine:
        """The engine, which holds the model under training."""

    @property
    def logger(self) -> logging.Logger:
        """The log of the run. Only messages of rank 0 appear in it."""

    @property
    def watchdog(self) -> Watchdog:
        """Ends ranks that make no progress. Put work that takes minutes under `with
        run.watchdog.phase("..."):`."""

    @property
    def iteration(self) -> int:
        """Number of optimizer steps done so far."""

    @property
    def consumed_samples(self) -> int:
        """Number of samples of the training data read so far, by all ranks."""

    @property
    def consumed_tokens(self) -> int:
        """Number of tokens of the training data read so far, by all ranks."""

    @property
    def companion_files(self) -> Mapping[str, bytes]:
        """The files beside the weights of an imported HuggingFace model, content by name. Exports include
        them again."""

    def pause(self) -> AbstractContextManager[None]:
        """Excludes the work in a `with` block from the step's time. Blocks may be nested.

        On entry it waits for the step's result, writes the step's log line and puts its values into
        `Step.row`.
        """

    def inference(self) -> AbstractContextManager[Model]:
        """Gives a `with` block the current model, for generation and scoring.

        Training then continues as if the block had not run: random generators are restored.
        """

    def save_hf_model(self, folder: Path) -> None:
        """Writes the current model to `folder` in HuggingFace's format, replacing an earlier model there once
        complete."""

    def stopping(self) -> bool:
        """Returns whether this rank has seen a stop signal. Long work should then be abandoned."""

    def request_stop(self, reason: str) -> None:
        """Ends the run one or two steps from now, after saving a checkpoint.

        One rank may ask alone; all ranks stop after the same step. reason: text for status.json and the log.
        """

    def request_save(self) -> None:
        """Saves a checkpoint one or two steps from now. One rank may ask alone; all ranks save after the same
        step."""
