"""What the last stage hands on: hidden states, and the head that makes logits of them."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class HeadInput(NamedTuple):
    """The end of the model, for whoever reads it: a loss in chunks or at chosen places makes no other logits.

    hidden_states: after the final norm, `[seq, batch, hidden]`, whole on every tensor rank, under sequence parallelism
    too; or the places alone that a batch asks for. head: from hidden states `[..., hidden]`, any of them in any order,
    to this rank's logits `[..., vocab/T]`. It communicates only where its weight is cut over data ranks (ZeRO 3): then
    all data ranks call it equally often. It is called before the forward of the stage returns.
    """

    hidden_states: Tensor
    head: Callable[[Tensor], Tensor]

    def logits(self) -> Tensor:
        """The logits of all places, `[..., vocab/T]`."""
        return self.head(self.hidden_states)
