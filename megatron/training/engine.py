"""The interface of training engines: loop, evaluation and checkpoints use nothing else of an engine.

`engine_choice` chooses the engine of a run, `parallelize` its pipeline schedule.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron.callbacks import OnGradients, Parts, StepResult
from megatron.checkpointing import OpenCheckpoint
from megatron.data import Batch
from megatron.model import Stage
from megatron.model.moe import RoutingCounts
from megatron.mpu import HeadInput, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective

PipelineSchedule = Literal["1F1B", "none"]
"""How micro-batches pass through the pipeline's stages: one forward, one backward in turns, or there
is one stage."""

HostCopy = Callable[[Tensor], Tensor]
"""Makes a copy on the CPU, with its own storage, of a tensor that goes on changing. The copy may still be in
flight when the call returns."""

State = dict[str, Tensor]
"""A parameter's optimizer state by key (`exp_avg`), and its number of updates, `step`."""


class Engine(Protocol):
    """A model under training in one layout. All ranks call every method together.

    Methods take and return weights by layer and name of the weight map; each rank has its own part.

    name: recorded in checkpoints.
    dtype: of weights and hidden states.
    zero_stage: what is sharded over data ranks, as in ZeRO (1: optimizer state, 2: gradients too, 3: weights
        too).
    routing: number of tokens that each expert got in the last step; None without experts.
    """

    name: str
    args: NeoXArgs
    groups: ParallelGroups
    objective: Objective
    dtype: torch.dtype
    zero_stage: int
    routing: RoutingCounts | None

    def __init__(
        self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective, schedule: PipelineSchedule
    ) -> None:
        """stage: on the meta device; the engine gives it memory and initial values (`init_stage`) as it will
        hold them."""

    @property
    def stage(self) -> Stage:
        """This rank's layers, with the weights after the last step. Read the property again after each step:
        the update of one step may still be written during the next."""

    @staticmethod
    def check(args: NeoXArgs) -> None:
        """Raise ConfigError for keys that this engine cannot honour, and RuntimeError where it cannot run.

        Called before anything is built.
        """

    @staticmethod
    def notes(args: NeoXArgs) -> list[str]:
        """Returns the engine's log lines for the start of a run."""

    def train_step(self, batches: list[Batch], lr: float, on_gradients: OnGradients | None = None) -> StepResult:
        """Take one optimizer step over this rank's micro-batches, with no more waits for the device than the
        update needs.

        The step's result is read after the next step has begun. After more than `nonfinite_guard.most_skips`
        skipped steps in a row, later steps leave the weights unchanged. So the loop still finds the last good
        weights.
        """

    def use_reference(self, fill: Callable[[list[Batch]], list[Batch]] | None) -> None:
        """Let `complete` call `fill`, which adds another model's outputs to micro-batches; None stops it.

        `fill` gets micro-batches on this rank's device. It adds the values that the objective reads
        (`Batch.method`).
        """

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches on this rank's device, with the reference's outputs and `baseline` if the
        objective needs them. `train_step` calls it."""

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

    def token_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) `[batch, seq]` fp32 of each micro-batch, the same on every pipeline and tensor
        rank; 0 at places outside `Batch.loss_places`."""

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns `token_logprobs` of batches shaped as a training step's; it runs compiled blocks if
        training does."""

    def scores(self, batches: list[Batch]) -> list[Tensor]:
        """Returns the sums `[n]` fp32 of `token_logprobs` over each answer, for each micro-batch."""

    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set parameters of this stage, fp32 master weights included, from this rank's local parts in any
        float type."""

    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        """Returns this rank's part of every parameter of its stage, on the CPU. master: fp32 master values of
        trained parameters."""

    def gather_weights(
        self, writer_of: Mapping[int, int], copy: HostCopy, name_filter: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yields (layer, weights by name) of the layers that this data rank writes, one after another.

        A layer without weights has {}. `copy` makes each tensor. writer_of: layer -> data rank. All ranks
        iterate to the end. name_filter: selects weights by name; None: all.
        """

    def gather_state(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """Yields (layer, optimizer state by name) as `gather_weights` yields weights. A state includes fp32
        master weights as `MASTER`."""

    def restore_state(self, read: Callable[[int, str], State]) -> None:
        """Set moments and step counts.

        read: returns the state of a parameter's local part for a layer and name, without `MASTER`.
        If parameters have no state, the optimizer stays fresh.
        """

    def model_state(self) -> dict[str, Any]:
        """Returns the state, besides weights and moments, that a run needs to resume bit for bit.

        It goes into the file of each model-parallel rank: `loss_scaler`, `spike_window`, and the state of the
        engine's library.
        """

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Restore `loss_scaler` and `spike_window` of `model_state` where present, and the run's `iteration`,
        `consumed_samples` and `skipped_steps`."""

    def layout_state(self) -> dict[str, Any] | None:
        """Returns this rank's optimizer state in a form that only the same layout can read.

        Used for optimizers without state by parameter. None if `model_state` holds the state.
        """

    def load_layout_state(self, state: Mapping[str, Any], checkpoint: OpenCheckpoint, name: str) -> None:
        """Restore the optimizer's state from the model file's `state`, or with ZeRO from the file `name`."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that this rank keeps between steps, by part: `weights`, `gradients` (once a
        step has begun), `optimizer states` with fp32 master weights."""

    def sharded_weights(self) -> Parts:
        """Returns fp32 values of trained parameters, each element of the model on exactly one rank."""

    def sharded_states(self) -> dict[str, Parts]:
        """Returns the tensors of the optimizer's state by key, each element on exactly one rank; {} before
        the first step."""

    def close(self) -> None:
        """Release hooks and buffers."""
