"""What the last pipeline stage hands to the loss: hidden states, and the head that turns them into logits."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class HeadInput(NamedTuple):
    """The final hidden states and the output layer, so that a loss computes only the logits that it needs.

    hidden_states: after the final norm, `[seq, batch, hidden]`, whole on every tensor rank, under sequence
    parallelism too; or only the positions that a batch asks for.
    head: from any hidden states `[..., hidden]` to this rank's logits `[..., vocab/T]`. It communicates only
    where its weight is sharded over data ranks (ZeRO 3); then all data ranks must call it equally often. It
    must be called before the forward pass of the stage returns.
    """

    hidden_states: Tensor
    head: Callable[[Tensor], Tensor]

    def logits(self) -> Tensor:
        """This rank's logits of all positions, `[..., vocab/T]`."""
        return self.head(self.hidden_states)
