"""The save interval, beside a run that is followed second by second and Young's formula."""

import pytest

from megatron.planning.goodput import Failures, best_goodput

DAY = 86400.0


def followed(work: int, failures: Failures, interval: float) -> float:
    """Returns the share of useful seconds, from the expected seconds between two saves.

    In each second the run goes on, or fails and restarts.
    """
    fail, segment, restart = 1.0 / interval, work + int(failures.save_seconds), int(failures.restart_seconds)
    # From a second on, a + b x (the expected seconds from a failure on); a restart may fail too.
    a, b = 0.0, 0.0
    for _ in range(segment):
        a, b = 1.0 + (1.0 - fail) * a, fail + (1.0 - fail) * b
    lost, survived = 0.0, 1.0  # seconds of a restart, until the segment begins
    for _ in range(restart):
        lost = 1.0 + (1.0 - fail) * lost
        survived *= 1.0 - fail
    lost /= survived
    return work / ((a + b * lost) / (1.0 - b))


def test_the_share_of_useful_time() -> None:
    failures = Failures(per_day=2.0, save_seconds=60.0, restart_seconds=300.0)
    goodput = best_goodput(10.0, 8, failures)
    assert goodput.seconds_between_failures == pytest.approx(DAY / 16)
    work = goodput.save_interval * 10
    assert goodput.useful_share == pytest.approx(followed(work, failures, DAY / 16), rel=0.01)
    for worse in (work // 2, 2 * work):
        assert followed(worse, failures, DAY / 16) < followed(work, failures, DAY / 16)


def test_rare_failures_are_youngs() -> None:
    """sqrt(2 x seconds of a save x seconds between failures)."""
    goodput = best_goodput(1.0, 1, Failures(0.01, 5.0, 60.0))
    assert goodput.save_interval == pytest.approx((2 * 5.0 * DAY / 0.01) ** 0.5, rel=0.02)
    assert goodput.useful_share > 0.99


def test_steps_longer_than_the_best_interval() -> None:
    goodput = best_goodput(1e5, 100, Failures(1.0, 1.0, 10.0))
    assert goodput.save_interval == 1 and goodput.useful_share < 0.01
