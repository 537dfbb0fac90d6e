"""The parts that engines share: passes without gradients, and completing the batches of a step."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.model import Stage, eager_blocks, forward_only
from megatron.model.moe import RoutingCounts
from megatron.mpu import HeadInput, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import loss_temperature
from megatron.objectives import Objective, label_logprobs, response_sums
from megatron.training.step_loss import StepLoss


class EngineBase:
    """The methods of `Engine` that run the stage and update nothing. The stage is `_stage`.

    An engine whose update goes on after its step overrides `finish_update`. It calls that before it reads
    weights or optimizer states. Forward passes then wait for the weights they use.
    """

    args: NeoXArgs
    groups: ParallelGroups
    _stage: Stage
    objective: Objective
    dtype: torch.dtype
    _loss: StepLoss
    _fill_reference: Callable[[list[Batch]], list[Batch]] | None = None
    routing: RoutingCounts | None = None

    @property
    def stage(self) -> Stage:
        """See `Engine`."""
        self.finish_update()
        return self._stage

    def finish_update(self) -> None:
        """Wait until weights and optimizer states are as after the last step."""

    def use_reference(self, fill: Callable[[list[Batch]], list[Batch]] | None) -> None:
        """See `Engine`."""
        self._fill_reference = fill

    def complete(self, batches: list[Batch]) -> list[Batch]:
        """See `Engine`."""
        batches = [batch.to(self.groups.device) for batch in batches]
        if self._fill_reference is not None:
            batches = self._fill_reference(batches)
        if self.objective.step_baselines is not None:
            batches = self.objective.step_baselines(batches, self.scores, self.groups.group("data"))
        return batches

    def forward_only(
        self,
        batches: list[Batch],
        read: Callable[[HeadInput, Batch], Tensor],
        shape: Callable[[Batch], tuple[int, ...]],
    ) -> list[Tensor]:
        """See `Engine`."""
        with eager_blocks(self.stage):  # ranks may run different numbers of these: none has an update left to do
            return self._forward_only(batches, read, shape)

    def _forward_only(
        self,
        batches: list[Batch],
        read: Callable[[HeadInput, Batch], Tensor],
        shape: Callable[[Batch], tuple[int, ...]],
    ) -> list[Tensor]:
        was_training = self._stage.training
        self._stage.eval()
        try:
            return self._forward(batches, read, shape)
        finally:
            self._stage.train(was_training)

    def _forward(
        self,
        batches: list[Batch],
        read: Callable[[HeadInput, Batch], Tensor],
        shape: Callable[[Batch], tuple[int, ...]],
    ) -> list[Tensor]:
        return forward_only(self._stage, batches, self.args, self.groups, read, dtype=self.dtype, shape=shape)

    def token_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """See `Engine`."""
        return self.forward_only(batches, self._label_logprobs, _shape)

    def _label_logprobs(self, head: HeadInput, batch: Batch) -> Tensor:
        columns, temperature = self.args.softmax_rows, loss_temperature(self.args)
        return label_logprobs(head, batch, self.groups.group("tensor"), columns, temperature)

    def scores(self, batches: list[Batch]) -> list[Tensor]:
        """See `Engine`."""
        logprobs = self.step_logprobs(batches)
        return [response_sums(v, b.to(v.device)) for v, b in zip(logprobs, batches, strict=True)]

    def step_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """See `Engine`."""
        # Steps ask for them: compiled blocks get one more graph in the first, that without gradients.
        return self._forward_only(batches, self._label_logprobs, _shape)

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
