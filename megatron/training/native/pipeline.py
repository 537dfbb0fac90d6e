"""Runs a step's micro-batches through this rank's pipeline stage, forward and backward, in the order of 1F1B.

torch.distributed.pipelining has a runtime for this. It cannot be used: it splits one batch itself, gives each
stage only the output of the one before, and computes the loss without the output layer.
"""

from collections.abc import Callable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.data import Batch
from megatron.model import HiddenStates, Stage
from megatron.model.pipeline_forward import hidden_buffer
from megatron.mpu import HeadInput, ParallelGroups
from megatron.mpu.pending_sends import PendingSends
from megatron.neox_arguments import ModelArgs
from megatron.training.native.pipeline_schedule import Action, one_forward_one_backward

ScaledLoss = Callable[[HeadInput, Batch], Tensor]
"""Returns the loss of a micro-batch, on which backward is called."""


class Links:
    """Sends and receives tensors between neighbouring stages of a pipeline.

    Each pair of neighbours has one process group for each direction. On a GPU these have streams of their
    own, so no message waits for a computation or for a message of the other direction.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        """Create and connect the groups. All ranks call it together."""
        self._members, self._position = groups.members["pipe"], groups.rank("pipe")
        size = len(self._members)
        self._sends = PendingSends(2 * size)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}  # by first stage of the pair, and direction
        # First pairs that begin with an even stage, then the others: torch names a group by the number of
        # groups before it, so both ranks of a pair must create it at the same place of their sequence.
        for parity in (0, 1):
            pair = self._position - (self._position + parity) % 2
            has_neighbour = 0 <= pair < size - 1
            ranks = list(self._members[pair : pair + 2]) if has_neighbour else [groups.world_rank]
            for step, direction in ((1, "forward"), (-1, "backward")):
                group = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"pipe {direction}")
                if has_neighbour:
                    self._groups[pair, step] = group
                    self._connect(pair, step, torch.zeros((), device=groups.device))
        self.finish()

    def _connect(self, pair: int, step: int, message: Tensor) -> None:
        """Exchange a first message. NCCL connects two ranks at that, and both wait for each other."""
        if self._position == (pair if step > 0 else pair + 1):
            self.send(message, step)
        elif (work := self.receive(message, step)) is not None:
            work.wait()

    def _group(self, step: int, sender: int) -> dist.ProcessGroup:
        """step: 1 for messages to the next stage, -1 to the one before. sender: its stage."""
        return self._groups[sender if step > 0 else sender - 1, step]

    def send(self, tensor: Tensor, step: int) -> None:
        """Begin to send a tensor to the next stage (step 1) or to the one before (step -1)."""
        tensor = tensor.contiguous()
        group = self._group(step, self._position)
        self._sends.add(dist.isend(tensor, dst=self._members[self._position + step], group=group), tensor)

    def receive(self, buffer: Tensor, step: int) -> dist.Work | None:
        """Begin to receive a tensor from the stage before (step 1) or from the next one (step -1)."""
        source = self._position - step
        return dist.irecv(buffer, src=self._members[source], group=self._group(step, source))

    def finish(self) -> None:
        """Wait until all tensors have been sent."""
        self._sends.wait()


class Pipeline:
    """Runs forward and backward of a step on this rank's stage; with one stage without any message.

    Hidden states `[seq/T, batch, hidden]` go to the next stage, their gradients to the stage before. Each
    message is received while the action before the one that needs it runs. A stage below which nothing is
    trained sends no gradients.
    """

    def __init__(self, stage: Stage, args: ModelArgs, groups: ParallelGroups, dtype: torch.dtype) -> None:
        """dtype: of hidden states. All ranks call it together."""
        self._stage, self._args, self._groups, self._dtype = stage, args, groups, dtype
        self._links = Links(groups) if groups.size("pipe") > 1 else None
        self._has_backward = stage.specs[-1].index >= stage.lowest_trained
        self._sends_gradients = stage.specs[0].index > stage.lowest_trained
        self._receiving: dict[Action, tuple[dist.Work | None, Tensor]] = {}
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor | GradientEdge] = {}

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
        actions = one_forward_one_backward(self._groups.rank("pipe"), self._groups.size("pipe"), len(batches))
        for action, next_action in zip_longest(actions, actions[1:]):
            for due in (action, next_action):
                if due is not None:
                    self._receive(due, batches[due.micro_batch])
            if action.kind == "forward":
                loss += self._forward(action, batches[action.micro_batch], scaled_loss)
            else:
                begin_backward(action.micro_batch == len(batches) - 1)
                self._backward(action)
        if self._links is not None:
            self._links.finish()
        return loss

    def _receive(self, action: Action, batch: Batch) -> None:
        """Begin to receive the tensor that an action needs, if it comes from another stage."""
        if action.kind == "forward":
            step, comes = 1, not self._groups.is_first_stage
        else:
            step, comes = -1, self._has_backward and not self._groups.is_last_stage
        if comes and action not in self._receiving:
            assert self._links is not None
            buffer = hidden_buffer(self._args, self._groups, batch, self._dtype)
            self._receiving[action] = (self._links.receive(buffer, step), buffer)

    def _received(self, action: Action) -> Tensor:
        work, buffer = self._receiving.pop(action)
        if work is not None:
            work.wait()
        return buffer

    def _forward(self, action: Action, batch: Batch, scaled_loss: ScaledLoss) -> Tensor | float:
        """Returns the micro-batch's loss on the last stage, and 0 on others."""
        hidden = None
        if not self._groups.is_first_stage:
            received = self._received(action).requires_grad_(self._sends_gradients)
            if self._sends_gradients:
                self._inputs[action.micro_batch] = received
            hidden = HiddenStates(received)
        out = self._stage(hidden, batch, lambda head: scaled_loss(head, batch))
        if not isinstance(out, HiddenStates):
            self._outputs[action.micro_batch] = out
            return out.detach()
        assert self._links is not None
        self._links.send(out.hidden_states.detach(), 1)
        if self._has_backward:  # an edge, so that the values are freed once they are sent
            self._outputs[action.micro_batch] = get_gradient_edge(out.hidden_states)
        return 0.0

    def _backward(self, action: Action) -> None:
        if not self._has_backward:
            return
        gradient = None if self._groups.is_last_stage else self._received(action)
        torch.autograd.backward(self._outputs.pop(action.micro_batch), gradient)
        if self._sends_gradients:
            gradient = self._inputs.pop(action.micro_batch).grad
            assert self._links is not None and gradient is not None
            self._links.send(gradient, -1)
