"""Learning rates of the original system up to `lr_decay_iters`, clamped after it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.training.schedules import Schedule, build_schedule
from tests.training.runs import BASE, GOLDEN

FOLDER = GOLDEN / "schedules"
META = json.loads((FOLDER / "eleuther_meta.json").read_text())
CASES = [name for name in META if name.split("_")[0] in ("linear", "cosine")]


def schedule_of(meta: dict) -> Schedule:
    return Schedule(meta["start_lr"], meta["min_lr"], meta["decay_style"], meta["warmup_iter"], meta["total_iters"])


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    meta = META[case]
    file = FOLDER / f"eleuther_{case}.npy"
    golden = np.load(file) if file.exists() else np.array(meta["values_before_failure"])
    schedule, end = schedule_of(meta), meta["total_iters"]
    ours = np.array([schedule(step) for step in range(end + 1)])
    np.testing.assert_allclose(ours, golden[: end + 1], rtol=1e-12, atol=0)
    assert ours[0] == ours[1] or meta["warmup_iter"] == 0
    assert {schedule(end + step) for step in range(1, 60)} == {schedule(end)}, "clamped past the end"


def test_constant() -> None:
    """Golden has its arguments only: flat after warm-up."""
    schedule = schedule_of(META["constant_w10_N100_min"])
    assert [schedule(s) for s in (0, 1, 5, 10, 11, 500)] == [1e-4, 1e-4, 5e-4, 1e-3, 1e-3, 1e-3]


def test_wsd() -> None:
    """Warm-up, plateau, linear decay to min_lr over the last lr_wsd_decay_iters (arXiv 2404.06395)."""
    schedule = Schedule(1.0, 0.1, "wsd", 10.0, 100, 20)
    assert [schedule(s) for s in (0, 1, 5, 10, 40, 80)] == [0.1, 0.1, 0.5, 1.0, 1.0, 1.0]
    assert schedule(90) == pytest.approx(0.55) and schedule(100) == pytest.approx(0.1) == schedule(1000)


@pytest.mark.parametrize(
    ("shape", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_shapes(shape: str, half: float) -> None:
    """Megatron-LM's optimizer_param_scheduler: share of (lr - min_lr) left at half of the decay."""
    schedule = Schedule(1.0, 0.1, "wsd", 0.0, 100, 20, shape)
    assert schedule(80) == 1.0 and schedule(90) == pytest.approx(0.1 + 0.9 * half)
    assert schedule(100) == pytest.approx(0.1)


def test_exponential() -> None:
    """start * exp(-0.693 t / T): upstream's, half at the end."""
    meta = META["exponential_w10_N100_min"]
    schedule = schedule_of(meta)
    assert schedule(55) == pytest.approx(1e-3 * 2.718281828459045 ** (-0.693 * 45 / 90), rel=1e-12)
    assert schedule(100) == pytest.approx(5e-4, rel=1e-3) and schedule(300) == schedule(100)


def test_warmup_begins_below_min_lr() -> None:
    """min_lr bounds the decay only: a 125M model warms up over 3200 steps from 1.9e-7 although min_lr is 6e-5."""
    schedule = Schedule(6e-4, 6e-5, "cosine", 3200.0, 320000)
    assert [schedule(s) for s in (1, 100, 3200)] == pytest.approx([1.875e-7, 1.875e-5, 6e-4], rel=1e-12)


def test_length_from_keys() -> None:
    args = {**BASE, "train_iters": 200, "warmup": 0.1, "lr_decay_style": "cosine"}
    assert build_schedule(NeoXArgs.from_dict({**args, "lr_decay_iters": 50})).end == 50
    part = build_schedule(NeoXArgs.from_dict({**args, "lr_decay_iters": None, "lr_decay_fraction": 0.5}))
    assert (part.end, part.warmup) == (100, 10.0)
