"""Batch arithmetic: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data
parallel."""

from collections.abc import Mapping
from typing import Final

BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_sizes(data_parallel: int, batch: int | None, micro: int | None, steps: int | None) -> Mapping[str, int]:
    """Returns batch, micro and steps, computed from any two of them. With batch or micro alone, steps is 1.

    Returns {} if neither batch nor micro is set. Raises ValueError, with the arithmetic, if the numbers do
    not match.
    """
    if batch is None and micro is None:
        return {}
    if batch is None:
        assert micro is not None
        steps = steps or 1
        batch = micro * steps * data_parallel
    elif micro is None:
        steps = steps or 1
        micro = _divide(batch, steps * data_parallel, f"gradient_accumulation_steps {steps}", data_parallel)
    elif steps is None:
        steps = _divide(batch, micro * data_parallel, f"train_micro_batch_size_per_gpu {micro}", data_parallel)
    elif batch != micro * steps * data_parallel:
        raise ValueError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps} x {data_parallel} data-parallel ranks = {micro * steps * data_parallel}; remove one of the three"
        )
    return dict(zip(BATCH_KEYS, (batch, micro, steps), strict=True))


def _divide(batch: int, divisor: int, factors: str, data_parallel: int) -> int:
    if batch % divisor:
        lower = batch // divisor * divisor
        nearest = f"{lower} or {lower + divisor}" if lower else f"{divisor}"
        raise ValueError(
            f"train_batch_size {batch} is not a multiple of {factors} x {data_parallel} data-parallel ranks = "
            f"{divisor}; {nearest} would be"
        )
    return batch // divisor
