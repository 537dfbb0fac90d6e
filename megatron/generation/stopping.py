"""Checks for stop signals while training generates texts, so that all ranks that generate together stop
together."""

import itertools
from collections.abc import Callable

import torch

from megatron.callbacks import TrainingRun
from megatron.generation.batching.requests import Event
from megatron.model import Model
from megatron.process import StopRequested, stop_signal

LOOKS = 256  # events between two checks for a stop signal


def signal_to(run: TrainingRun, *axes: str) -> int:
    """Returns the number of the stop signal that any rank of this model replica has received; 0 if there is
    none.

    All ranks of the model replica, and of the groups `axes`, call this function together.

    axes: further parallel groups whose ranks count too, such as "data".
    """
    number = torch.tensor(float(stop_signal()), device=run.groups.device)
    for axis in ("context", "tensor", "pipe", *axes):
        run.groups.max(number, axis)
    return int(number)


def looks_for_stop(run: TrainingRun, model: Model) -> Callable[[Event], None]:
    """Returns an `on_event` function for `complete` that raises StopRequested if a stop signal has arrived.

    Every `LOOKS` events it checks for signals to any rank of the model replica (with `model.lockstep`: of all
    replicas).
    """
    events, axes = itertools.count(1), ("data",) if model.lockstep else ()

    def look(event: Event) -> None:
        if next(events) % LOOKS == 0 and (number := signal_to(run, *axes)):
            raise StopRequested(number)

    return look
