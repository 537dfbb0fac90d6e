"""Defines the interface of training engines; loop, evaluation and checkpoints use nothing else of an engine.

It also holds the code that engines share: a step's loss, passes without gradients, and completing a step's
batches. `engine_choice` chooses the engine of a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.callbacks import OnGradients, Parts, RunEngine, StepResult
from megatron.checkpointing import OpenCheckpoint
from megatron.data import Batch
from megatron.model import Stage, eager_blocks, forward_only, with_context
from megatron.model.moe import RoutingCounts
from megatron.model.pipeline_forward import Read, Shape
from megatron.mpu import HeadInput, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import loss_temperature
from megatron.objectives import ROW_LOSSES, Objective, label_logprobs, response_sums
from megatron.training.nonfinite_guard import GradientWatch, SpikeGuard, most_skips

HostCopy = Callable[[Tensor], Tensor]
"""Returns a copy on the CPU, with its own storage, of a tensor that later steps change. The copy may still be
running when the call returns."""

State = dict[str, Tensor]
"""A parameter's optimizer state by key (`exp_avg`), and its number of updates, `step`."""


class StepLoss:
    """Computes the scaled loss of each micro-batch of a step, on which the engine calls backward.

    It also reports each loss to `watch`, which looks for NaN and Inf.
    metrics: `[metrics, 2]`, sum and count of each of the objective's metrics over the step's micro-batches.
    maxima: the largest value of each metric in `objective.maxima`.
    rows: the summed loss of each row, `[batch]` for each micro-batch, if the objective returns it.
    """

    def __init__(self, objective: Objective, groups: ParallelGroups, watch: GradientWatch) -> None:
        self.objective, self.group, self.watch = objective, groups.group("tensor"), watch
        self.scale = torch.ones((), device=groups.device)
        self.metrics = torch.zeros(len(objective.metrics), 2, device=groups.device)
        self.maxima = torch.zeros(len(objective.maxima), device=groups.device)
        self.rows: list[Tensor] = []

    def begin(self, scale: Tensor) -> None:
        """Begin a step: set its metrics to zero. scale: `[k]`, a factor for each part of the objective's
        loss."""
        self.scale = scale
        self.metrics.zero_()
        self.maxima.zero_()
        self.rows = []

    def scaled_loss(self, head: HeadInput, batch: Batch) -> Tensor:
        """Returns the scaled loss of one micro-batch, an fp32 scalar with its autograd graph."""
        parts, metrics = self.objective.loss_sum(head, batch, self.group)
        self.objective.add_metrics(self.metrics, metrics)
        self.objective.note_maxima(self.maxima, metrics)
        if self.objective.keeps_rows:
            self.rows.append(metrics[ROW_LOSSES].detach())
        return (parts * self.scale).sum() * self.watch.note_loss(parts.sum())


class Engine(RunEngine, Protocol):
    """Trains a model in one parallel layout. All ranks call every method together.

    Weights are passed by layer index and by their name in the weight map. Each rank passes its own part.

    The methods implemented in this class run the stage and update nothing. An engine whose update may go on
    after `train_step` has returned overrides `finish_update`, and calls it before it reads weights or
    optimizer states. Its forward passes wait for the weights that they use.

    name: recorded in checkpoints.
    dtype: of weights and hidden states.
    zero_stage: state that is sharded over data ranks, as in ZeRO (1: optimizer state, 2: gradients too,
        3: weights too).
    routing: how the last step's tokens were spread over experts; None without experts.
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

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, stage: Stage, objective: Objective) -> None:
        """Build the engine around a stage. All ranks call it together.

        stage: on the meta device; the engine allocates its weights and sets their initial values.
        """

    @staticmethod
    def check(args: NeoXArgs) -> None:
        """Raise ConfigError for keys that this engine cannot honour, or RuntimeError if it cannot run here.

        Called before anything is built.
        """

    @staticmethod
    def notes(args: NeoXArgs) -> list[str]:
        """Returns the engine's log lines for the start of a run."""

    def train_step(self, batches: list[Batch], lr: float, on_gradients: OnGradients | None = None) -> StepResult:
        """Take one optimizer step over this rank's micro-batches.

        The host waits for the device only if the update needs it.
        on_gradients: called with the gradients that this rank owns, before the update.
        The loop reads the result after the next step has begun. Therefore, after more than
        `nonfinite_guard.most_skips` skipped steps in a row, later steps leave the weights unchanged, and the
        loop still finds the last good weights.
        """

    def set_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set parameters of this stage, fp32 master weights included.

        weights: this rank's tensor-parallel parts by layer and name, in any float dtype.
        """

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Within the block, the model's weights are their averages (`ema_decay`). Do not train or save in it.

        Only the native engine keeps averages.
        """
        raise NotImplementedError

    def gather_weights(
        self, writer_of: Mapping[int, int], copy: HostCopy, name_filter: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yields (layer, weights by name) for each layer that this data rank writes, one layer at a time.

        writer_of: maps each layer to the data rank that writes it. copy: makes each yielded tensor.
        name_filter: selects weights by name; None: all. A layer without weights yields {}. All ranks iterate
        to the end.
        """

    def gather_state(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """Yields (layer, optimizer state by parameter name) for each layer that this data rank writes.

        A state includes fp32 master weights under the key `MASTER`. writer_of: maps each layer to the data
        rank that writes it. copy: makes each yielded tensor. All ranks iterate to the end.
        """

    def restore_state(self, read: Callable[[int, str], State]) -> None:
        """Set the optimizer's moments and step counts.

        read: takes layer and name; returns the saved state of this rank's part of that parameter, without
            `MASTER`. {}: no state is saved, and the optimizer stays fresh.
        """

    def model_state(self) -> dict[str, Any]:
        """Returns the state, besides weights and moments, that a run needs to resume bit for bit.

        It has `loss_scaler`, `spike_window`, and state of the engine's library. Each model-parallel rank
        saves it in its `mp_rank` file.
        """

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved `model_state`: here `spike_window`, the recent losses, if present.

        Engines with counters or a loss scale of their own override it.
        """
        if self.spikes is not None:
            self.spikes.restore(state.get("spike_window", []))

    def layout_state(self) -> dict[str, Any] | None:
        """Returns this rank's optimizer state in a form that only the same parallel layout can read.

        Used for optimizers whose state is not kept by parameter. None if `model_state` holds the state.
        """
        return None

    def load_layout_state(self, state: Mapping[str, Any], checkpoint: OpenCheckpoint, name: str) -> None:
        """Restore the optimizer's state from a checkpoint of the same parallel layout.

        state: content of the model file, read without ZeRO. name: file of the checkpoint, read with ZeRO.
        """

    def tensors(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that this rank keeps between steps, by part.

        The parts are `weights`, `gradients` (once a step has begun) and `optimizer states`, which includes
        fp32 master weights.
        """

    def weight_copies(self) -> dict[str, Tensor]:
        """Returns the weights after the last step that other ranks may hold too, by name.

        The name tells which elements a tensor holds (`copy_name`). Tensors of the same name on two ranks must
        have the same bits. fp32 master weights that are not sharded are among them.
        """

    def sharded_states(self) -> dict[str, Parts]:
        """Returns the optimizer's state tensors by key (`exp_avg`), each element on exactly one rank.

        {} before the first step.
        """

    def close(self) -> None:
        """Release hooks and buffers."""

    # -- what engines share ----------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        """This rank's layers, with the weights after the last step. Read the property again after each step,
        because reading it completes the update of the last step."""
        self.finish_update()
        return self._stage

    def finish_update(self) -> None:
        """Wait until the last step's update of weights and optimizer states is complete."""

    def use_reference(self, fill: Callable[[list[Batch]], list[Batch]] | None) -> None:
        """Set the function by which `complete` adds a reference model's outputs to micro-batches; None: none.

        fill: takes micro-batches on this rank's device, and returns them with the values that the objective
            reads (`Batch.method`).
        """
        self._fill_reference = fill

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches on this rank's device, with the reference model's outputs and the
        objective's baselines if it needs them. `train_step` calls it."""
        batches = [batch.to(self.groups.device) for batch in self._parts_of(batches)]
        if self._fill_reference is not None:
            batches = self._fill_reference(batches)
        if self.objective.step_baselines is not None:
            batches = self.objective.step_baselines(batches, self.scores, self.groups.group("data"))
        return batches

    def forward_only(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
        """Returns `read(head, batch)` of each micro-batch, without gradients; the same on every pipeline
        rank.

        read: gets the final hidden states with the output layer. shape: returns the shape of `read`'s result.
        """
        with eager_blocks(self.stage):  # `stage` completes the update: ranks may run different numbers of passes
            return self._forward_only(batches, read, shape)

    def _forward_only(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
        was_training = self._stage.training
        self._stage.eval()
        try:
            return self._forward(batches, read, shape)
        finally:
            self._stage.train(was_training)

    def _forward(self, batches: list[Batch], read: Read, shape: Shape) -> list[Tensor]:
        batches = self._parts_of(batches)
        return forward_only(self._stage, batches, self.args, self.groups, read, dtype=self.dtype, shape=shape)

    def _parts_of(self, batches: list[Batch]) -> list[Batch]:
        return [with_context(batch, self.args, self.groups) for batch in batches]

    def token_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) `[batch, seq]` fp32 of each micro-batch, the same on every pipeline and tensor
        rank. It is 0 at positions outside `Batch.loss_places`."""
        return self.forward_only(batches, self._label_logprobs, _shape)

    def _label_logprobs(self, head: HeadInput, batch: Batch) -> Tensor:
        columns, temperature = self.args.softmax_rows, loss_temperature(self.args)
        return label_logprobs(head, batch, self.groups.group("tensor"), columns, temperature)

    def scores(self, batches: list[Batch]) -> list[Tensor]:
        """Returns the summed log-probability of each answer, `[answers]` fp32, for each micro-batch."""
        logprobs = self.step_logprobs(batches)
        return [response_sums(v, b.to(v.device)) for v, b in zip(logprobs, batches, strict=True)]

    def step_losses(self, batches: list[Batch]) -> list[Tensor]:
        """Returns what a training step on these micro-batches would compute, without gradients or an update.

        For each micro-batch `[1 + batch * seq]` fp32: its part of the step's loss, then log p(label) of each
        token. Parts are multiplied by `loss_factor`. Dropout is the step's. All ranks call it together.
        """
        batches = self.complete(batches)
        weight = self._begin_losses(batches)
        self._loss.begin(self.loss_factor(len(batches)) / weight.clamp(min=1.0))
        self._stage.train()
        self._begin_balance(batches, 1.0 / len(batches))

        def read(head: HeadInput, batch: Batch) -> Tensor:
            loss, logprobs = self._loss.scaled_loss(head, batch), self._label_logprobs(head, batch)
            return torch.cat([loss.view(1), logprobs.float().flatten()])

        return self._forward(batches, read, lambda batch: (1 + batch.tokens.numel(),))

    def loss_factor(self, micro_batches: int) -> int:
        """Returns the factor of each micro-batch's loss that undoes the means of the engine's library."""
        return 1

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Returns log p(label) `[batch, seq]` fp32 of each micro-batch, computed by compiled blocks if
        training uses them. The batches must have the shapes of a training step."""
        # Steps call it, so compiled blocks get one more graph, without gradients, in the first step.
        return self._forward_only(batches, self._label_logprobs, _shape)

    def _watch_losses(self, names: Sequence[str]) -> None:
        """Create the loss of steps and the guards that skip updates (NaN or Inf, loss spikes).

        names: of the trained parameters.
        """
        args = self.args
        self.watch = GradientWatch(names, self.groups.device, most_skips(args))
        self.spikes = SpikeGuard(args.skip_step_above_sigma) if args.skip_step_above_sigma is not None else None
        self._loss = StepLoss(self.objective, self.groups, self.watch)

    def _begin_losses(self, batches: list[Batch]) -> Tensor:
        """Returns the weight of each part of a step's loss, summed over data ranks, `[k]`; begins to watch
        the step for NaN and Inf."""
        weight = self.groups.sum(torch.stack([self.objective.weight(batch) for batch in batches]).sum(0), "data")
        self.watch.begin(weight)
        return weight

    def _begin_balance(self, batches: list[Batch], scale: float | Tensor) -> None:
        """Prepare the load-balancing losses of the stage's routers for a step.

        If they need the expert counts of all tokens of the step, a forward pass counts them first. scale:
        factor of these losses in the backward pass of a micro-batch.
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
        """Update the stage's FP8 scales and expert biases, once the step's gradients are computed.

        left_out: boolean `[]`, whether the step's update is skipped.
        """
        if self._stage.delayed_scaling is not None:
            self._stage.delayed_scaling.end_step(left_out)
        if self._stage.balance is not None:
            self.routing = self._stage.balance.end(self.groups, left_out)

    def _mean_metrics(self) -> dict[str, Tensor]:
        """Returns the step's means of the objective's and the routers' metrics, by name, equal on every rank.
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
