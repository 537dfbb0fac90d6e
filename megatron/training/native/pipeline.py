"""Runs a step's micro-batches through this rank's pipeline stages, forward and backward, in the order of the
configured schedule.

torch.distributed.pipelining has a runtime for this. It cannot be used: it splits one batch itself, gives each
stage only the output of the one before, and computes the loss without the output layer.
"""

from collections import deque
from collections.abc import Callable
from itertools import zip_longest

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
from megatron.neox_arguments import ModelArgs
from megatron.training.native.pipeline_schedule import Action, action_tables

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
        # First pairs that begin with an even rank, then those with an odd one, at last the ring's: torch names
        # a group by the number of groups before it, so both ranks of a pair must create it at the same place
        # of their sequence.
        for parity in (0, 1):
            first = self._rank - (self._rank + parity) % 2
            self._link(groups, (first, first + 1) if 0 <= first < size - 1 else None)
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


class Pipeline:
    """Runs forward and backward of a step on this rank's stages; with one stage without any message.

    Hidden states `[seq/T, batch, hidden]` go to the next stage, their gradients to the stage before. Each
    message is received while the action before the one that needs it runs. A stage below which nothing is
    trained sends no gradients.
    """

    def __init__(self, stage: Stage, args: ModelArgs, groups: ParallelGroups, dtype: torch.dtype) -> None:
        """dtype: of hidden states. All ranks call it together."""
        self._stage, self._args, self._groups, self._dtype = stage, args, groups, dtype
        self._rank, ranks = groups.rank("pipe"), groups.size("pipe")
        self._placement = StagePlacement.of(args, ranks)
        self._links = Links(groups, is_ring=self._placement.chunks > 1) if ranks > 1 else None
        stages = partition_layers(args, self._placement.stages)
        self._has_backward = [specs[-1].index >= stage.lowest_trained for specs in stages]
        self._sends_gradients = [specs[0].index > stage.lowest_trained for specs in stages]
        self._chunk_of = {number: chunk for chunk, number in enumerate(self._placement.stages_of(self._rank))}
        self._coming: dict[int, deque[Action]] = {}
        self._received: dict[Action, tuple[dist.Work | None, Tensor]] = {}
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor | GradientEdge] = {}

    def run(
        self,
        batches: list[Batch],
        scaled_loss: ScaledLoss,
        begin_backward: Callable[[bool], None],
    ) -> Tensor:
        """Returns the sum of the micro-batches' losses on the last stage, and 0 on others.

        begin_backward: called before each backward; gets whether it is the step's last.
        """
        loss = torch.zeros((), device=self._groups.device)
        tables = action_tables(self._args, self._placement, len(batches))
        self._coming = {rank: self._messages(table, rank) for rank, table in enumerate(tables) if rank != self._rank}
        actions = [a for a in tables[self._rank] if a.kind == "forward" or self._has_backward[a.stage]]
        last = [action for action in actions if action.kind == "backward"][-1:]
        for action, next_action in zip_longest(actions, actions[1:]):
            for due in (action, next_action):
                if due is not None:
                    self._receive(due, batches)
            if action.kind == "forward":
                loss += self._forward(action, batches[action.micro_batch], scaled_loss)
            else:
                begin_backward(action in last)
                self._backward(action)
        if self._links is not None:
            self._links.finish()
        return loss

    def _source(self, action: Action) -> Action | None:
        """Returns the action whose result an action needs; None if it needs none of another stage."""
        stage = action.stage - 1 if action.kind == "forward" else action.stage + 1
        return action._replace(stage=stage) if 0 <= stage < self._placement.stages else None

    def _messages(self, table: list[Action], sender: int) -> deque[Action]:
        """Returns the actions of this rank whose input `sender` sends, in the order in which it does.

        table: the actions of `sender`.
        """
        messages = deque[Action]()
        for action in table:
            step, sends = (1, True) if action.kind == "forward" else (-1, self._sends_gradients[action.stage])
            receiver = action._replace(stage=action.stage + step)
            if sends and receiver.stage in self._chunk_of:
                messages.append(receiver)
        return messages

    def _receive(self, action: Action, batches: list[Batch]) -> None:
        """Begin to receive the tensor that an action needs, and those that its sender sends before."""
        source = self._source(action)
        if source is None or action in self._received:
            return
        assert self._links is not None
        sender = self._placement.rank_of(source.stage)
        while action not in self._received:
            coming = self._coming[sender].popleft()
            buffer = hidden_buffer(self._args, self._groups, batches[coming.micro_batch], self._dtype)
            self._received[coming] = (self._links.receive(buffer, sender), buffer)

    def _take(self, action: Action) -> Tensor:
        work, buffer = self._received.pop(action)
        if work is not None:
            work.wait()
        return buffer

    def _forward(self, action: Action, batch: Batch, scaled_loss: ScaledLoss) -> Tensor | float:
        """Returns the micro-batch's loss on the last stage, and 0 on others."""
        hidden, key = None, (action.stage, action.micro_batch)
        if action.stage > 0:
            received = self._take(action).requires_grad_(self._sends_gradients[action.stage])
            if self._sends_gradients[action.stage]:
                self._inputs[key] = received
            hidden = HiddenStates(received)
        out = self._stage(hidden, batch, lambda head: scaled_loss(head, batch), self._chunk_of[action.stage])
        if not isinstance(out, HiddenStates):
            self._outputs[key] = out
            return out.detach()
        assert self._links is not None
        self._links.send(out.hidden_states.detach(), self._placement.rank_of(action.stage + 1))
        if self._has_backward[action.stage]:  # an edge, so that the values are freed once they are sent
            self._outputs[key] = get_gradient_edge(out.hidden_states)
        return 0.0

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        gradient = None if self._source(action) is None else self._take(action)
        torch.autograd.backward(self._outputs.pop(key), gradient)
        if self._sends_gradients[action.stage]:
            gradient = self._inputs.pop(key).grad
            assert self._links is not None and gradient is not None
            self._links.send(gradient, self._placement.rank_of(action.stage - 1))
