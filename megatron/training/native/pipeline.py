"""Runs a step's micro-batches through this rank's pipeline stages, forward and backward, in the order of the
configured schedule.

torch.distributed.pipelining has a runtime for this. It cannot be used: it splits one batch itself, gives each
stage only the output of the one before, and computes the loss without the output layer.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.data import Batch
from megatron.model import HiddenStates, Stage
from megatron.model.pipeline_forward import hidden_buffer
from megatron.model.pipeline_partition import StagePlacement, partition_layers
from megatron.mpu import HeadInput, ParallelGroups
from megatron.mpu.pending_sends import PendingSends
from megatron.neox_arguments import NeoXArgs
from megatron.training.native.pipeline_schedule import Action, action_tables
from megatron.training.native.shards import GradientPass

ScaledLoss = Callable[[HeadInput, Batch], Tensor]
"""Returns the loss of a micro-batch, on which backward is called."""


class Links:
    """Sends and receives tensors between neighbouring pipeline ranks.

    Each pair of neighbours has one process group for each direction. On a GPU these have streams of their
    own, so no message waits for a computation or for a message of the other direction. Messages of one
    direction are received in the order in which they are sent.
    """

    def __init__(self, groups: ParallelGroups, is_ring: bool) -> None:
        """Create and connect the groups. All ranks call it together.

        is_ring: the last rank and the first are neighbours, too.
        """
        self._members, self._rank = groups.members["pipe"], groups.rank("pipe")
        size = len(self._members)
        self._sends = PendingSends(4 * size)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}  # by (sender, receiver)
        # First pairs that begin with an even rank, then those with an odd one, then the ring's. torch names a
        # group by the number of groups before it, so both ranks of a pair must create it at the same place of
        # their sequence.
        for parity in (0, 1):
            lower_rank = self._rank - (self._rank + parity) % 2
            self._link(groups, (lower_rank, lower_rank + 1) if 0 <= lower_rank < size - 1 else None)
        if is_ring and size > 2:
            self._link(groups, (size - 1, 0) if self._rank in (0, size - 1) else None)
        self.finish()

    def _link(self, groups: ParallelGroups, pair: tuple[int, int] | None) -> None:
        """Connect a pair of ranks in both directions. None: this rank belongs to no such pair."""
        for number, direction in enumerate(("forward", "backward")):
            ranks = [groups.world_rank] if pair is None else sorted(self._members[rank] for rank in pair)
            group = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"pipe {direction}")
            if pair is not None:
                sender, receiver = pair[number], pair[1 - number]
                self._groups[sender, receiver] = group
                self._connect(sender, receiver, torch.zeros((), device=groups.device))

    def _connect(self, sender: int, receiver: int, message: Tensor) -> None:
        """Exchange a first message. NCCL connects two ranks at that, and both wait for each other."""
        if self._rank == sender:
            self.send(message, receiver)
        elif (work := self.receive(message, sender)) is not None:
            work.wait()

    def send(self, tensor: Tensor, receiver: int) -> None:
        """Begin to send a tensor to another pipeline rank."""
        tensor, group = tensor.contiguous(), self._groups[self._rank, receiver]
        self._sends.add(dist.isend(tensor, dst=self._members[receiver], group=group), tensor)

    def receive(self, buffer: Tensor, sender: int) -> dist.Work | None:
        """Begin to receive a tensor from another pipeline rank."""
        return dist.irecv(buffer, src=self._members[sender], group=self._groups[sender, self._rank])

    def finish(self) -> None:
        """Wait until all tensors have been sent."""
        self._sends.wait()


class Input(NamedTuple):
    """A tensor that a stage gets from a neighbour: hidden states from the one before, or a gradient from the
    next."""

    kind: Literal["hidden_states", "gradient"]
    stage: int
    micro_batch: int


class Plan(NamedTuple):
    """The work of a rank in a step.

    actions: in order. passes: of the actions that compute gradients. messages: what it receives from each
    other rank, in order.
    """

    actions: list[Action]
    passes: dict[Action, GradientPass]
    messages: dict[int, list[Input]]


class Pipeline:
    """Runs forward and backward of a step on this rank's stages; with one stage without any message.

    Hidden states `[seq/T, batch, hidden]` go to the next stage, their gradients to the stage before. Each
    message is received while the action before the one that needs it runs. A stage below which nothing is
    trained sends no gradients.
    """

    def __init__(self, stage: Stage, args: NeoXArgs, groups: ParallelGroups, dtype: torch.dtype) -> None:
        """dtype: of hidden states. All ranks call it together."""
        self._stage, self._args, self._groups, self._dtype = stage, args, groups, dtype
        self._rank, ranks = groups.rank("pipe"), groups.size("pipe")
        self._placement = StagePlacement.configured(args, ranks)
        is_ring = self._placement.chunks > 1 and not self._placement.is_v
        self._links = Links(groups, is_ring) if ranks > 1 else None
        stages = partition_layers(args, self._placement.stages)
        self._has_backward = [max(spec.index for spec in specs) >= stage.lowest_trained for specs in stages]
        self._sends_gradients = [specs[0].index > stage.lowest_trained for specs in stages]
        self.chunk_of = {number: chunk for chunk, number in enumerate(self._placement.stages_of(self._rank))}
        self._plans: dict[int, Plan] = {}  # by number of micro-batches
        self._coming: dict[int, deque[Input]] = {}
        self._received: dict[Input, tuple[dist.Work | None, Tensor]] = {}
        # By stage and micro-batch.
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor | GradientEdge] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def run(
        self,
        batches: list[Batch],
        scaled_loss: ScaledLoss,
        begin_gradients: Callable[[GradientPass], None],
        end_gradients: Callable[[GradientPass], None],
    ) -> Tensor:
        """Returns the sum of the micro-batches' losses on the last stage, and 0 on others.

        begin_gradients, end_gradients: called before and after each action that computes gradients.
        """
        loss = torch.zeros((), device=self._groups.device)
        if len(batches) not in self._plans:
            self._plans[len(batches)] = self._plan(len(batches))
        actions, passes, messages = self._plans[len(batches)]
        self._coming = {rank: deque(inputs) for rank, inputs in messages.items()}
        for action, next_action in zip_longest(actions, actions[1:]):
            for due in (action, next_action):
                if due is not None:
                    self._receive(due, batches)
            if action.kind == "forward":
                loss += self._forward(action, batches[action.micro_batch], scaled_loss)
                continue
            begin_gradients(passes[action])
            if action.kind == "backward_weight":
                self._backward_weight(action)
            else:
                self._backward(action)
            end_gradients(passes[action])
        if self._links is not None:
            self._links.finish()
        return loss

    def _plan(self, micro_batches: int) -> Plan:
        """Returns what this rank does in a step of so many micro-batches."""
        tables = action_tables(self._args, self._placement, micro_batches)
        messages = {rank: self._messages(table) for rank, table in enumerate(tables) if rank != self._rank}
        actions = [a for a in tables[self._rank] if a.kind == "forward" or self._has_backward[a.stage]]
        passes: dict[Action, GradientPass] = {}
        begun_stages = set[int]()
        for action in (action for action in reversed(actions) if action.kind != "forward"):
            layers = frozenset(spec.index for spec in self._stage.chunks[self.chunk_of[action.stage]])
            is_deferred = action.kind == "backward_weight"
            passes[action] = GradientPass(layers, action.stage not in begun_stages, not begun_stages, is_deferred)
            begun_stages.add(action.stage)
        return Plan(actions, passes, messages)

    def _input(self, action: Action) -> Input | None:
        """Returns the tensor of another stage that an action needs; None if it needs none."""
        if action.kind == "forward":
            return Input("hidden_states", *action[1:]) if action.stage > 0 else None
        is_needed = action.kind != "backward_weight" and action.stage < self._placement.stages - 1
        return Input("gradient", *action[1:]) if is_needed else None

    def _output(self, action: Action) -> Input | None:
        """Returns what an action's result is for another stage; None if no stage needs it."""
        if action.kind == "forward" and action.stage < self._placement.stages - 1:
            return Input("hidden_states", action.stage + 1, action.micro_batch)
        if action.kind in ("backward", "backward_input") and self._sends_gradients[action.stage]:
            return Input("gradient", action.stage - 1, action.micro_batch)
        return None

    def _messages(self, table: list[Action]) -> list[Input]:
        """Returns what this rank gets from another, in the order in which that rank sends it.

        table: the actions of that rank.
        """
        outputs = (self._output(action) for action in table)
        return [output for output in outputs if output is not None and output.stage in self.chunk_of]

    def _receive(self, action: Action, batches: list[Batch]) -> None:
        """Begin to receive the tensor that an action needs, and those that its sender sends before."""
        due = self._input(action)
        if due is None or due in self._received:
            return
        sender = self._placement.rank_of(due.stage + (-1 if due.kind == "hidden_states" else 1))
        if sender == self._rank:
            return  # `_send` keeps it
        assert self._links is not None
        while due not in self._received:
            coming = self._coming[sender].popleft()
            buffer = hidden_buffer(self._args, self._groups, batches[coming.micro_batch], self._dtype)
            self._received[coming] = (self._links.receive(buffer, sender), buffer)

    def _take(self, due: Input) -> Tensor:
        work, tensor = self._received.pop(due)
        if work is not None:
            work.wait()
        return tensor

    def _send(self, tensor: Tensor, output: Input) -> None:
        """Begin to send a result to the stage that needs it."""
        receiver = self._placement.rank_of(output.stage)
        if receiver == self._rank:
            self._received[output] = (None, tensor)
        else:
            assert self._links is not None
            self._links.send(tensor, receiver)

    def _forward(self, action: Action, batch: Batch, scaled_loss: ScaledLoss) -> Tensor | float:
        """Returns the micro-batch's loss on the last stage, and 0 on others."""
        hidden, key = None, action[1:]
        if (due := self._input(action)) is not None:
            received = self._take(due).requires_grad_(self._sends_gradients[action.stage])
            if self._sends_gradients[action.stage]:
                self._inputs[key] = received
            hidden = HiddenStates(received)
        out = self._stage(hidden, batch, lambda head: scaled_loss(head, batch), self.chunk_of[action.stage])
        if not isinstance(out, HiddenStates):
            self._outputs[key] = out
            return out.detach()
        output = self._output(action)
        assert output is not None
        self._send(out.hidden_states.detach(), output)
        if self._has_backward[action.stage]:  # an edge, so that the values are freed once they are sent
            self._outputs[key] = get_gradient_edge(out.hidden_states)
        return 0.0

    def _backward(self, action: Action) -> None:
        due, key = self._input(action), action[1:]
        gradient = None if due is None else self._take(due)
        with nullcontext([]) if action.kind == "backward" else self._collected() as deferred:
            torch.autograd.backward(self._outputs.pop(key), gradient)
        if action.kind == "backward_input":
            self._deferred[key] = deferred
        if (output := self._output(action)) is not None:
            gradient = self._inputs.pop(key).grad
            assert gradient is not None
            self._send(gradient, output)

    def _backward_weight(self, action: Action) -> None:
        deferred = deque(self._deferred.pop(action[1:]))
        while deferred:
            deferred.popleft()()  # its activations are freed before the next one runs

    def _collected(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Returns a context in which weight gradients are left for later."""
        assert self._stage.deferred is not None, "`defer_weight_gradients` prepares the stage"
        return self._stage.deferred.collect()
