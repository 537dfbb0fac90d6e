"""Batch arithmetic: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data
parallel."""

from collections.abc import Mapping
from typing import Final

BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_sizes(data_parallel: int, batch: int | None, micro: int | None, steps: int | None) -> Mapping[str, int]:
    """Any two of (batch, micro, steps) give the third; with batch or micro alone, steps is 1.

    Returns {} when neither batch nor micro is given. Raises ValueError with the arithmetic when it does not
    work out.
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


def _divide(batch: int, divisor: int, what: str, data_parallel: int) -> int:
    if batch % divisor:
        below = batch // divisor * divisor
        near = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise ValueError(
            f"train_batch_size {batch} is not a multiple of {what} x {data_parallel} data-parallel ranks = {divisor}; "
            f"{near} would be"
        )
    return batch // divisor
