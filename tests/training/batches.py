"""The micro-batches that the loop would train on."""

from collections.abc import Iterator

from megatron.data import Batch
from megatron.training import Training
from megatron.training.loop import steps_of
from megatron.training.method import StepData


def batches_of(training: Training) -> Iterator[list[Batch]]:
    """The micro-batches of each optimizer step still to do, of this rank."""
    return map(StepData.take, steps_of(training))
