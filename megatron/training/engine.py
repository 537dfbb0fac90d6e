"""What a training engine is asked for, and what it answers. Loop, evaluation and checkpoints know no more of
one than this; which engine there is, `engine_choice` says, and which pipeline schedule, `parallelize`."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron.callbacks import OnGradients, Parts, StepResult
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
"""Makes a copy on the CPU, with its own storage, of a tensor that goes on changing; it may still be on its
way."""

State = dict[str, Tensor]
"""A parameter's optimizer state by key (`exp_avg`), and its number of updates, `step`."""


class Engine(Protocol):
    """A model under training in one layout. All ranks call every method together; weights go in and out by
    layer and name of the weight map, each rank with its own part.

    name: by which a checkpoint records it; dtype: of weights and hidden states; zero_stage: what is cut over
    data ranks, as ZeRO counts it (1: optimizer state, 2: gradients too, 3: weights too). routing: of the last
    step, what experts got; None without experts.
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
        """This rank's layers, with the weights after the last step. Take it anew after each: what one step
        changes may be written under the next."""

    @staticmethod
    def check(args: NeoXArgs) -> None:
        """Raise ConfigError for what this engine cannot do, and RuntimeError where it cannot work here,
        before anything is built."""

    @staticmethod
    def notes(args: NeoXArgs) -> list[str]:
        """What it says of itself at the start."""

    def train_step(self, batches: list[Batch], lr: float, on_gradients: OnGradients | None = None) -> StepResult:
        """One optimizer step over this rank's micro-batches of it, without a wait for the device that the
        update does not need.

        A step's result is read after the next has begun. Once more than `nonfinite_guard.most_skips` steps in
        a row were skipped, later steps leave the weights as they are, so that the loop still finds the last
        good ones.
        """

    def use_reference(self, fill: Callable[[list[Batch]], list[Batch]] | None) -> None:
        """From now on `complete` calls `fill`, which sets what micro-batches on this rank's device, and their
        `kl_batch`, have of another model (`reference_logprobs`, `reference_output`, `top_ids`); None: no
        longer."""

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches on this rank's device, with `reference_logprobs` and `baseline` where the
        objective needs them; `train_step` does it by itself."""

    def forward_only(
        self,
        batches: list[Batch],
        read: Callable[[HeadInput, Batch], Tensor],
        shape: Callable[[Batch], tuple[int, ...]],
    ) -> list[Tensor]:
        """Read something off hidden states and head of each micro-batch, without gradients; the same on every
        pipeline rank."""

    def token_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """log p(label) `[batch, seq]` fp32 of each micro-batch, 0 at places that it leaves out
        (`Batch.loss_places`); the same on every pipeline and tensor rank."""

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """`token_logprobs` for what every step asks of batches of its own shape: blocks run compiled where
        those of training do."""

    def scores(self, batches: list[Batch]) -> list[Tensor]:
        """The sums `[n]` fp32 of `token_logprobs` over each answer of each micro-batch."""

    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Give parameters of this stage their values (local part, any float type), fp32 master weights
        included."""

    def weights(self, *, master: bool = False) -> dict[int, dict[str, Tensor]]:
        """This rank's part of every parameter of its stage, on CPU; fp32 master values of trained ones if
        asked for."""

    def gather_weights(
        self, writer_of: Mapping[int, int], copy: HostCopy, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(layer, weights by name; {} for one without) of the layers that this data rank writes, one after
        another, each tensor made by `copy`. writer_of: layer -> data rank; all iterate to the end. wanted: of
        which names; None: of all."""

    def gather_state(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """(layer, optimizer state by name, fp32 master weights beside it as `MASTER`) likewise."""

    def restore_state(self, read: Callable[[int, str], State]) -> None:
        """Set moments and step counts. read: state of a parameter's local part by layer and name, `MASTER`
        left out; parameters without state leave a fresh optimizer."""

    def model_state(self) -> dict[str, Any]:
        """What a run must know beside weights and moments to go on bit for bit, for the file of each
        model-parallel rank: `loss_scaler`, `spike_window`, and what the engine's library keeps."""

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Go on with `loss_scaler` and `spike_window` of `model_state`, as far as they are there, and with
        the run's `iteration`, `consumed_samples` and `skipped_steps`."""

    def layout_state(self) -> dict[str, Any] | None:
        """This rank's optimizer state as only its own layout can read it, for optimizers whose state is not
        kept by parameter; None where `model_state` holds it."""

    def load_layout_state(self, state: Mapping[str, Any], file: Path) -> None:
        """Restore the optimizer's state from `model_state`, or from the `file` with `layout_state`."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that this rank keeps between steps, by part: `weights`, `gradients` (where a step has
        begun), `optimizer states` with fp32 master weights."""

    def sharded_weights(self) -> Parts:
        """fp32 values of trained parameters, such that every element of the model is owned by exactly one
        rank."""

    def sharded_states(self) -> dict[str, Parts]:
        """Tensors of the optimizer's state by key, likewise; {} before the first step."""

    def close(self) -> None:
        """Release hooks and buffers."""
