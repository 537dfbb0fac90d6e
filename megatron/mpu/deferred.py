"""Weight gradients that are computed later than the rest of a backward pass, in zero-bubble pipelines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


class DeferredGradients:
    """Collects computations of weight gradients that a backward pass leaves for later.

    A zero-bubble pipeline first computes the gradients of hidden states, for which other ranks wait. Weight
    gradients fill the time in which this rank would wait (arXiv 2401.10241). Gradients of biases, norms,
    embeddings and the output layer are not deferred, because they take little time or belong to the loss.
    """

    def __init__(self) -> None:
        self._deferred: list[Callable[[], None]] | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether layers leave their weight gradients for later."""
        return self._deferred is not None

    @contextmanager
    def collect(self) -> Iterator[list[Callable[[], None]]]:
        """Within the context, weight gradients are not computed but added to the list.

        Each function in the list computes one gradient and adds it to the weight's.
        """
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def add(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Leave a gradient for later. weight: a leaf of autograd, whose hooks run then. gradient: computes
        it."""
        assert self._deferred is not None
        self._deferred.append(partial(_accumulate, weight, gradient))


def _accumulate(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        value = gradient()
    torch.autograd.backward(weight, value)
