"""Whether a run that has been made is the one that is asked for, trained on."""

from typing import Any

import pytest

from megatron.pipelines.digests import only_longer

FINISHED_RUN: dict[str, Any] = {"config": {"train_iters": 10, "lr": 0.1}, "data": "d"}


@pytest.mark.parametrize(("now", "longer"), [
    ({"config": {"train_iters": 10, "lr": 0.1}, "data": "d"}, True),
    ({"config": {"train_iters": 11, "lr": 0.1}, "data": "d"}, True),
    ({"config": {"train_iters": 9, "lr": 0.1}, "data": "d"}, False),
    ({"config": {"train_iters": 11, "lr": 0.2}, "data": "d"}, False),
    ({"config": {"train_iters": 11, "lr": 0.1}, "data": "e"}, False),
    ({"config": {"train_epochs": 2, "lr": 0.1}, "data": "d"}, False),
])  # fmt: skip
def test_a_run_goes_on_where_it_is_longer_alone(now: dict[str, Any], longer: bool) -> None:
    assert only_longer(FINISHED_RUN, now) is longer
