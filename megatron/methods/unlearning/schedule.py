"""Decides which iterations of an unlearning run train on the forget set, `ga_dataset`."""

from megatron.methods.unlearning.keys import UnlearningKeys


def is_ascent(keys: UnlearningKeys, iteration: int) -> bool:
    """Returns whether the step after `iteration` steps trains on the forget set, `ga_dataset`.

    The first step is ordinary, as in the geodesic fork of GPT-NeoX. With `ga_mode: interleaved`, one of each
    `ga_interleave_ratio` + 1 later steps trains on `ga_dataset`. With `ga_mode: interval`, `ga_iters` steps
    on it replace each `ga_interval`-th ordinary step.
    """
    if keys.ga_dataset is None or iteration == 0:
        return False
    if keys.ga_mode == "interleaved":
        return iteration % (keys.ga_interleave_ratio + 1) == 0
    return _place_in_burst(keys, iteration) is not None


def begins_burst(keys: UnlearningKeys, iteration: int) -> bool:
    """Returns whether the step after `iteration` steps is the first in a burst of steps on `ga_dataset`.

    With `ga_mode: interleaved` each such step is a burst of its own.
    """
    return is_ascent(keys, iteration) and (keys.ga_mode == "interleaved" or _place_in_burst(keys, iteration) == 0)


def _place_in_burst(keys: UnlearningKeys, iteration: int) -> int | None:
    assert keys.ga_interval is not None and keys.ga_iters is not None
    place = (iteration - keys.ga_interval) % (keys.ga_interval - 1 + keys.ga_iters)
    return place if iteration >= keys.ga_interval and place < keys.ga_iters else None


def ascent_steps(keys: UnlearningKeys, start: int, end: int) -> int:
    """Returns how many of the steps [start, end), counted from 0, train on `ga_dataset`."""
    return _ascents_before(keys, end) - _ascents_before(keys, start) if start < end else 0


def _ascents_before(keys: UnlearningKeys, end: int) -> int:
    if keys.ga_dataset is None or end == 0:
        return 0
    if keys.ga_mode == "interleaved":
        return (end - 1) // (keys.ga_interleave_ratio + 1)
    assert keys.ga_interval is not None and keys.ga_iters is not None
    cycles, place = divmod(max(0, end - keys.ga_interval), keys.ga_interval - 1 + keys.ga_iters)
    return cycles * keys.ga_iters + min(place, keys.ga_iters)


def optimizer_steps(keys: UnlearningKeys, iterations: int) -> int:
    """Returns the number of optimizer steps in `iterations` of `train_iters`.

    `train_iters` counts a burst of `ga_mode: interval` as one iteration, but the burst has `ga_iters` steps.
    """
    if keys.ga_dataset is None or keys.ga_mode == "interleaved":
        return iterations
    assert keys.ga_interval is not None and keys.ga_iters is not None
    return iterations + (iterations - 1) // keys.ga_interval * (keys.ga_iters - 1)
