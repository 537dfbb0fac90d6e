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
    """The stop signal that has come to one of the ranks of a replica of the model, and of these axes, which
    ask together; 0 without one."""
    number = torch.tensor(float(stop_signal()), device=run.groups.device)
    for axis in ("context", "tensor", "pipe", *axes):
        run.groups.max(number, axis)
    return int(number)


def looks_for_stop(run: TrainingRun, model: Model) -> Callable[[Event], None]:
    """An `on_event` of `complete`, which raises StopRequested once a stop signal has come to one of the ranks
    that write with this one."""
    events, axes = itertools.count(1), ("data",) if model.lockstep else ()

    def look(event: Event) -> None:
        if next(events) % LOOKS == 0 and (number := signal_to(run, *axes)):
            raise StopRequested(number)

    return look
