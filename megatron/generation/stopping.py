"""Stop signals while texts are written: the ranks that write together agree every so many tokens."""

import itertools
from collections.abc import Callable

import torch

from megatron.callbacks import TrainingRun
from megatron.generation.batching.requests import Event
from megatron.model import Model
from megatron.process import StopRequested, stop_signal

LOOKS = 256  # tokens, of all texts, after which the ranks that write them look for a stop signal


def signal_to(run: TrainingRun, *axes: str) -> int:
    """Returns the number of the stop signal that a rank of this model replica received; 0 if none did.

    axes: further parallel groups whose ranks are asked. All these ranks call it together.
    """
    number = torch.tensor(float(stop_signal()), device=run.groups.device)
    for axis in ("context", "tensor", "pipe", *axes):
        run.groups.max(number, axis)
    return int(number)


def looks_for_stop(run: TrainingRun, model: Model) -> Callable[[Event], None]:
    """Returns an `on_event` function for `complete` that raises StopRequested after a stop signal.

    Every `LOOKS` events it asks all ranks of the model replica (with `model.lockstep`, of all replicas).
    """
    events, axes = itertools.count(1), ("data",) if model.lockstep else ()

    def look(event: Event) -> None:
        if next(events) % LOOKS == 0 and (number := signal_to(run, *axes)):
            raise StopRequested(number)

    return look
