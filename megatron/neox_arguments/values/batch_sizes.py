"""Computes batch sizes by the rule train_batch_size = micro-batch size x accumulation steps x data-parallel
size."""

from collections.abc import Mapping
from typing import Final

BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_sizes(data_parallel: int, batch: int | None, micro: int | None, steps: int | None) -> Mapping[str, int]:
    """Returns the three keys of BATCH_KEYS with their values, computed from any two of them.

    batch: train_batch_size. micro: train_micro_batch_size_per_gpu. steps: gradient_accumulation_steps; 1 if
    only one of the others is set. data_parallel: number of data-parallel ranks.

    Returns {} if neither batch nor micro is set. Raises ValueError, which shows the arithmetic, if the
    numbers do not match.
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
            f"{divisor}; set it to {nearest}"
        )
    return batch // divisor
