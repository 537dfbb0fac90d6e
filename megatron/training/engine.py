"""The interface of training engines: loop, evaluation and checkpoints use nothing else of an engine. And what
engines share: a step's loss, passes without gradients, and completing the batches of a step.

`engine_choice` chooses the engine of a run, `parallelize` its pipeline schedule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron.callbacks import OnGradients, Parts, RunEngine, StepResult
from megatron.checkpointing import OpenCheckpoint
from megatron.data import Batch
from megatron.model import Stage, eager_blocks, forward_only
from megatron.model.moe import RoutingCounts
from megatron.model.pipeline_forward import Read, Shape
from megatron.mpu import HeadInput, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import loss_temperature
from megatron.objectives import Objective, label_logprobs, response_sums
from megatron.training.nonfinite_guard import GradientWatch, SpikeGuard, most_skips

PipelineSchedule = Literal["1F1B", "none"]
"""How micro-batches pass through the pipeline's stages: one forward, one backward in turns, or there
is one stage."""

HostCopy = Callable[[Tensor], Tensor]
"""Makes a copy on the CPU, with its own storage, of a tensor that goes on changing. The copy may still be in
flight when the call returns."""

State = dict[str, Tensor]
"""A parameter's optimizer state by key (`exp_avg`), and its number of updates, `step`."""


class StepLoss:
    """Computes the objective's loss of each micro-batch, times `scale`, for an engine to run
    backwards, and reports it to `watch`.

    metrics: `[metrics, 2]`, sums and counts over the step's micro-batches. maxima: their largest values.
    """

    def __init__(self, objective: Objective, groups: ParallelGroups, watch: GradientWatch) -> None:
        self.objective, self.group, self.watch = objective, groups.group("tensor"), watch
        self.scale = torch.ones((), device=groups.device)
        self.metrics = torch.zeros(len(objective.metrics), 2, device=groups.device)
        self.maxima = torch.zeros(len(objective.maxima), device=groups.device)

    def begin(self, scale: Tensor) -> None:
        """Begin a step, and set its metrics to zero. scale: `[k]`, the factor of each part of the loss."""
        self.scale = scale
        self.metrics.zero_()
        self.maxima.zero_()

    def scaled_loss(self, head: HeadInput, batch: Batch) -> Tensor:
        """Returns the scaled loss of one micro-batch, an fp32 scalar with its graph."""
        parts, metrics = self.objective.loss_sum(head, batch, self.group)
        self.objective.add_metrics(self.metrics, metrics)
        self.objective.note_maxima(self.maxima, metrics)
        return (parts * self.scale).sum() * self.watch.note_loss(parts.sum())


class Engine(RunEngine, Protocol):
    """A model under training in one layout. All ranks call every method together.

    Methods take and return weights by layer and name of the weight map; each rank has its own part.

    Methods that are written here run the stage, `_stage`, and update nothing. An engine whose update goes on
    after its step overrides `finish_update`. It calls that before it reads weights or optimizer states.
    Forward passes then wait for the weights they use.

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
    routing: RoutingCounts | None = None
    _stage: Stage
    watch: GradientWatch
    spikes: SpikeGuard | None
    _loss: StepLoss
    _fill_reference: Callable[[list[Batch]], list[Batch]] | None = None

    def __init__(
        self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective, schedule: PipelineSchedule
    ) -> None:
        """stage: on the meta device; the engine gives it memory and initial values (`init_stage`) as it will
        hold them."""

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

    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set parameters of this stage, fp32 master weights included, from this rank's local parts in any
        float type."""

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
        """Restore `spike_window` of `model_state` where present.

        Engines with counters or a loss scale of their own override it.
        """
        if self.spikes is not None:
            self.spikes.restore(state.get("spike_window", []))

    def layout_state(self) -> dict[str, Any] | None:
        """Returns this rank's optimizer state in a form that only the same layout can read.

        Used for optimizers without state by parameter. None if `model_state` holds the state.
        """
        return None

    def load_layout_state(self, state: Mapping[str, Any], checkpoint: OpenCheckpoint, name: str) -> None:
        """Restore the optimizer's state from the model file's `state`, or with ZeRO from the file `name`."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that this rank keeps between steps, by part: `weights`, `gradients` (once a
        step has begun), `optimizer states` with fp32 master weights."""

    def sharded_states(self) -> dict[str, Parts]:
        """Returns the tensors of the optimizer's state by key, each element on exactly one rank; {} before
        the first step."""

    def close(self) -> None:
        """Release hooks and buffers."""

    # -- what engines share ----------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        """This rank's layers, with the weights after the last step. Read the property again after each step:
        the update of one step may still be written during the next."""
        self.finish_update()
        return self._stage

    def finish_update(self) -> None:
        """Wait until weights and optimizer states are as after the last step."""

    def use_reference(self, fill: Callable[[list[Batch]], list[Batch]] | None) -> None:
        """Let `complete` call `fill`, which adds another model's outputs to micro-batches; None stops it.

        `fill` gets micro-batches on this rank's device. It adds the values that the objective reads
        (`Batch.method`).
        """
        self._fill_reference = fill

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches on this rank's device, with the reference's outputs and `baseline` if the
        objective needs them. `train_step` calls it."""
        batches = [batch.to(self.groups.device) for batch in batches]
        if self._fill_reference is not None:
            batches = self._fill_reference(batches)
        if self.objective.step_baselines is not None:
            batches = self.objective.step_baselines(batches, self.scores, self.groups.group("data"))
        return batches

    def forward_only(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
        """See `RunEngine`."""
        with eager_blocks(self.stage):  # ranks may run different numbers of these: none has an update left to do
            return self._forward_only(batches, read, shape)

    def _forward_only(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
        was_training = self._stage.training
        self._stage.eval()
        try:
            return self._forward(batches, read, shape)
        finally:
            self._stage.train(was_training)

    def _forward(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
        return forward_only(self._stage, batches, self.args, self.groups, read, dtype=self.dtype, shape=shape)

    def token_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) `[batch, seq]` fp32 of each micro-batch, the same on every pipeline and tensor
        rank; 0 at places outside `Batch.loss_places`."""
        return self.forward_only(batches, self._label_logprobs, _shape)

    def _label_logprobs(self, head: HeadInput, batch: Batch) -> Tensor:
        columns, temperature = self.args.softmax_rows, loss_temperature(self.args)
        return label_logprobs(head, batch, self.groups.group("tensor"), columns, temperature)

    def scores(self, batches: list[Batch]) -> list[Tensor]:
        """Returns the sums `[n]` fp32 of `token_logprobs` over each answer, for each micro-batch."""
        logprobs = self.step_logprobs(batches)
        return [response_sums(v, b.to(v.device)) for v, b in zip(logprobs, batches, strict=True)]

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns `token_logprobs` of batches shaped as a training step's; it runs compiled blocks if
        training does."""
        # Steps ask for them: compiled blocks get one more graph in the first, that without gradients.
        return self._forward_only(batches, self._label_logprobs, _shape)

    def _watch_losses(self, names: Sequence[str]) -> None:
        """Prepare the losses of steps, and the guards of its updates. names: of the trained parameters."""
        args = self.args
        self.watch = GradientWatch(names, self.groups.device, most_skips(args))
        self.spikes = SpikeGuard(args.skip_step_above_sigma) if args.skip_step_above_sigma is not None else None
        self._loss = StepLoss(self.objective, self.groups, self.watch)

    def _begin_losses(self, batches: list[Batch]) -> Tensor:
        """Returns the weight of a step over all data ranks, `[k]`, and begins to watch the step."""
        weight = self.groups.sum(torch.stack([self.objective.weight(batch) for batch in batches]).sum(0), "data")
        self.watch.begin(weight)
        return weight

    def _begin_balance(self, batches: list[Batch], scale: float | Tensor) -> None:
        """Prepare the stage's load balancing for a step.

        Counts the choices of experts where its losses need the counts of all tokens. scale: factor of these
        losses in the backward pass of a micro-batch.
        """
        balance = self._stage.balance
        if balance is None:
            return
        balance.begin(scale, len(batches) * self.groups.size("data"))
        if balance.needs_counts:
            with balance.count(self.groups):  # with the step's dropout, so that the choices are the step's
                zero = torch.zeros((), device=self.groups.device)
                self._forward(batches, lambda head, batch: zero, lambda batch: ())

    def _end_step(self, left_out: Tensor) -> None:
        """Update the stage's FP8 scales and expert biases, once the step's gradients are there.

        left_out: boolean `[]`, whether the step changes no weights.
        """
        if self._stage.delayed_scaling is not None:
            self._stage.delayed_scaling.end_step(left_out)
        if self._stage.balance is not None:
            self.routing = self._stage.balance.end(self.groups, left_out)

    def _mean_metrics(self) -> dict[str, Tensor]:
        """Returns the step's means of the objective's metrics and of the routers', the same on every rank.
        Call it after `_end_step`."""
        routed = dict(self.routing.metrics) if self.routing is not None else {}
        if not self.objective.metrics:
            return routed
        sums = self.groups.sum(self._loss.metrics, "data")
        means = self.objective.means(self.groups.from_last_stage(sums))
        if self.objective.maxima:
            largest = self.groups.from_last_stage(self.groups.max(self._loss.maxima, "data"))
            means |= dict(zip(self.objective.maxima, largest.clone().unbind(), strict=True))
        return {**means, **routed}


def _shape(batch: Batch) -> tuple[int, ...]:
    return tuple(batch.tokens.shape)
