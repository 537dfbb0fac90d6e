"""Keeps tensors that are being sent to another rank until they have been."""

from collections import deque

import torch.distributed as dist
from torch import Tensor


class PendingSends:
    """Keeps tensors that are being sent, in order, and drops those that have been sent when another is added.

    limit: number of tensors above which `add` waits for the oldest. gloo does not tell which have been sent.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._sends = limit, deque[tuple[dist.Work, Tensor]]()

    def add(self, work: dist.Work | None, tensor: Tensor) -> None:
        """Keep `tensor`. work: of its `isend`; None if nothing is sent."""
        if work is not None:
            self._sends.append((work, tensor))
        while self._sends and (len(self._sends) > self._limit or self._sends[0][0].is_completed()):
            self._sends.popleft()[0].wait()

    def wait(self) -> None:
        """Wait until all tensors have been sent."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def __len__(self) -> int:
        return len(self._sends)
