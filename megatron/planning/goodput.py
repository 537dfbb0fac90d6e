"""Chooses how often to save, by the failures of machines, and tells the share of time that is useful then."""

import math
from functools import partial
from typing import NamedTuple


class Failures(NamedTuple):
    """How often a machine fails, and what saves and restarts cost.

    per_day: failures of one machine in a day, at random times. save_seconds: in which a save stops training.
    restart_seconds: from a failure to the next step, besides the steps that are lost.
    """

    per_day: float
    save_seconds: float
    restart_seconds: float


class Goodput(NamedTuple):
    """The best save interval, in steps, and the share of time in steps that are not lost.

    seconds_between_failures: of the full run.
    """

    save_interval: int
    useful_share: float
    seconds_between_failures: float


def best_goodput(step_seconds: float, machines: int, failures: Failures) -> Goodput:
    """Returns the save interval with the largest share of useful time."""
    failure_interval = 86400.0 / (failures.per_day * machines)
    share_of = partial(_useful_share, step_seconds, failure_interval, failures)
    # Young's interval (Comm. ACM 17, 1974) is too long if saves are not short; the best one is not longer.
    young = math.sqrt(2 * failures.save_seconds * failure_interval)
    low, high = 1, max(1, math.ceil(young / step_seconds))
    while high - low > 2:  # the share has one maximum
        a, b = low + (high - low) // 3, high - (high - low) // 3
        if share_of(a) < share_of(b):
            low = a
        else:
            high = b
    steps = max(range(low, high + 1), key=share_of)
    return Goodput(steps, share_of(steps), failure_interval)


def _useful_share(step_seconds: float, failure_interval: float, failures: Failures, steps: int) -> float:
    """Returns the share of time in useful steps, if a save follows each `steps` steps.

    Daly's expected time (Future Gener. Comput. Syst. 22, 2006): failures may also strike saves and restarts.
    """
    work = steps * step_seconds
    exponent = (work + failures.save_seconds) / failure_interval
    if exponent > 500.0:
        return 0.0
    expected = failure_interval * math.exp(failures.restart_seconds / failure_interval) * math.expm1(exponent)
    return work / expected
