"""Learning rates of the original system up to `lr_decay_iters`, clamped after it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpointing import CheckpointError
from megatron.neox_arguments import NeoXArgs
from megatron.training.schedules import Schedule, build_schedule, resumed_schedule
from tests.pool import run_ranks
from tests.training.runs import ADAMW, BASE, GOLDEN, NEOX, config, curves, output_of_run, run_to_end

FOLDER = GOLDEN / "schedules"
META = json.loads((FOLDER / "eleuther_meta.json").read_text())
CASES = [name for name in META if (FOLDER / f"eleuther_{name}.npy").exists() or "values_before_failure" in META[name]]


def schedule_of(meta: dict) -> Schedule:
    return Schedule(meta["start_lr"], meta["min_lr"], meta["decay_style"], meta["warmup_iter"], meta["total_iters"])


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    meta, file = META[case], FOLDER / f"eleuther_{case}.npy"
    golden = np.load(file) if file.exists() else np.array(meta["values_before_failure"])
    schedule, end = schedule_of(meta), meta["total_iters"]
    actual = np.array([schedule(step) for step in range(end + 1)])
    np.testing.assert_allclose(actual, golden[: end + 1], rtol=1e-12, atol=0)
    assert actual[0] == actual[1] or meta["warmup_iter"] == 0
    assert {schedule(end + step) for step in range(1, 60)} == {schedule(end)}, "clamped past the end"


@pytest.mark.parametrize(("schedule", "rates"), [
    # Golden has its arguments only: flat after warm-up.
    (schedule_of(META["constant_w10_N100_min"]), {0: 1e-4, 1: 1e-4, 5: 5e-4, 10: 1e-3, 11: 1e-3, 500: 1e-3}),
    # start * exp(-0.693 t / T), upstream's, half at the end.
    (schedule_of(META["exponential_w10_N100_min"]), {55: 1e-3 * math.exp(-0.693 * 45 / 90)}),
    (schedule_of(META["exponential_w10_N100_min"]), {step: 1e-3 * math.exp(-0.693) for step in (100, 300)}),
    # min_lr bounds the decay only: warm-up begins below it.
    (Schedule(6e-4, 6e-5, "cosine", 3200.0, 320000), {1: 1.875e-7, 100: 1.875e-5, 3200: 6e-4}),
    # Warm-up, plateau, linear decay to min_lr over the last lr_wsd_decay_iters (arXiv 2404.06395).
    (Schedule(1.0, 0.1, "wsd", 10.0, 100, 20), {0: 0.1, 1: 0.1, 5: 0.5, 10: 1.0, 40: 1.0, 80: 1.0}),
    (Schedule(1.0, 0.1, "wsd", 10.0, 100, 20), {90: 0.55, 100: 0.1, 1000: 0.1}),
    # Megatron-LM's optimizer_param_scheduler: the share of lr - min_lr that is left at half of the decay.
    *(
        (Schedule(1.0, 0.1, "wsd", 0.0, 100, 20, shape), {80: 1.0, 90: 0.1 + 0.9 * half, 100: 0.1})
        for shape, half in (
            ("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5),
        )
    ),
])  # fmt: skip
def test_rates(schedule: Schedule, rates: dict[int, float]) -> None:
    assert {step: schedule(step) for step in rates} == pytest.approx(rates, rel=1e-12)


NO_WARMUP = {key: value for key, value in BASE.items() if key != "warmup"}


def test_length_and_warmup_from_keys() -> None:
    def schedule_from(**keys: Any) -> tuple[int, float]:
        values = {**NO_WARMUP, "train_iters": 200, "lr_decay_style": "cosine", **keys}
        schedule = build_schedule(NeoXArgs.from_dict(values))
        return schedule.end, schedule.warmup

    assert schedule_from(warmup=0.1, lr_decay_iters=50) == (50, 5.0)
    assert schedule_from(warmup=0.1, lr_decay_iters=None, lr_decay_fraction=0.5) == (100, 10.0)
    assert schedule_from(warmup_iters=30) == (200, 30.0)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_lr_scaling(scaling: str, factor: float) -> None:
    """By the data-parallel size, 4 of 8 ranks; the smallest rate too."""
    values = {**BASE, "model_parallel_size": 2, "min_lr": 1e-4, "lr_scaling": scaling}
    schedule = build_schedule(NeoXArgs.from_dict(values).for_world(8))
    assert (schedule.start_lr, schedule.min_lr) == pytest.approx((1e-3 * factor, 1e-4 * factor), rel=1e-12)


SAVED = META["cosine_frac_warmup_N150"]["state_dict"]  # written by the original system


def resume(
    saved: dict[str, Any] | None = None, saved_config: dict[str, Any] | None = None, **overrides: Any
) -> Schedule:
    keys = {"train_iters": 150, "lr_decay_style": "cosine", "min_lr": 6e-5, "warmup": 0.01, **overrides}
    lr = {"optimizer": {"type": "Adam", "params": {"lr": keys.pop("lr", 6e-4)}}}
    if "warmup_iters" in keys:
        del keys["warmup"]
    args = NeoXArgs.from_dict({**NO_WARMUP, **lr, **keys}).for_world(1)
    state = SAVED if saved is None else saved
    return resumed_schedule(build_schedule(args), state, args, "there/global_step5", saved_config or {})


def test_same_schedule_resumes() -> None:
    assert resume() == resume(override_lr_scheduler=True) == resume(use_checkpoint_lr_scheduler=True)
    assert resume().state_dict(SAVED["num_iters"]) == SAVED


@pytest.mark.parametrize(("change", "line"), [
    ({"lr": 1e-3}, r"optimizer.params.lr: start_lr 0.001 .*0.0006"),
    ({"min_lr": 1e-5}, r"min_lr: min_lr 1e-05 .*6e-05"),
    ({"warmup": 0.02}, r"warmup: warmup_iter 3.0 .*1.5"),
    ({"warmup_iters": 4}, r"warmup_iters: warmup_iter 4.0 .*1.5"),
    ({"lr_decay_iters": 160, "warmup": 0.009375}, r"lr_decay_iters: end_iter 160 .*150"),
    ({"train_iters": 300, "warmup": 0.005}, r"train_iters: end_iter 300 .*150"),
    ({"lr_decay_style": "linear"}, r"lr_decay_style: decay_style linear .*cosine"),
])  # fmt: skip
def test_changed_schedule(change: dict[str, Any], line: str) -> None:
    keys = "override_lr_scheduler.*use_checkpoint_lr_scheduler"
    with pytest.raises(CheckpointError, match=f"^{line}.*{keys}") as refused:
        resume(**change)
    assert "there/global_step5" in str(refused.value)
    assert resume(**change, use_checkpoint_lr_scheduler=True) == resume()
    assert resume(**change, override_lr_scheduler=True) != resume()


def test_the_key_that_changed_is_named_not_what_follows_from_it() -> None:
    """The saved configuration is known: a warm-up that is a share of the run follows from its length."""
    saved_keys = {"train_iters": 150, "warmup": 0.01, "lr_scaling": "none"}
    with pytest.raises(CheckpointError, match=r"^train_iters: end_iter 300 .*150; train_iters: warmup_iter 3.0 .*1.5"):
        resume(saved_config=saved_keys, train_iters=300)
    with pytest.raises(CheckpointError, match="^optimizer.params.lr: start_lr 0.001"):
        resume(saved_config={**saved_keys, "optimizer": {"params": {"lr": 6e-4}}}, lr=1e-3, lr_scaling="none")


def test_schedules_that_do_not_differ() -> None:
    """A constant rate has no end and no minimum; checkpoints of other tools may hold no schedule."""
    constant = {**SAVED, "decay_style": "constant", "warmup_iter": 0.0}
    assert resume(constant, lr_decay_style="constant", warmup=0.0, train_iters=300, min_lr=0.0).end == 300
    assert resume({}) == resume()
    with pytest.raises(CheckpointError, match="no learning-rate schedule.*use_checkpoint_lr_scheduler"):
        resume({}, use_checkpoint_lr_scheduler=True)


def test_wsd_is_kept_whole() -> None:
    """NeoX's entries say nothing of the final decay; ours do."""
    wsd = {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "minus_sqrt"}
    state = resume(**wsd, override_lr_scheduler=True).state_dict(5)
    assert resume(state, use_checkpoint_lr_scheduler=True) == resume(state, **wsd)
    with pytest.raises(CheckpointError, match=r"lr_wsd_decay_iters: wsd_decay_iters 30 .*20; .*linear .*minus_sqrt"):
        resume(state, lr_decay_style="wsd", lr_wsd_decay_iters=30)


def test_runs_use_the_configured_schedule(tmp_path: Path) -> None:
    first_run = config(NEOX, ADAMW, lr_decay_style="cosine", warmup=0.2, save=str(tmp_path), checkpoint_factor=3)
    run_ranks(run_to_end, 1, {**first_run, "exit_interval": 3})
    changed = {**first_run, "save": None, "load": str(tmp_path), "lr_decay_style": "linear"}
    with pytest.raises(AssertionError, match=r"lr_decay_style: decay_style linear .*/global_step3.*cosine"):
        run_ranks(output_of_run, 1, changed)
    stored = {**changed, "use_checkpoint_lr_scheduler": True}
    configs = [{**changed, "override_lr_scheduler": True}, stored, {**stored, "lr_decay_style": "cosine"}]
    configured, stored_rates, cosine = (part.rates for part in run_ranks(curves, 1, configs, 2)[0])
    linear = Schedule(1e-3, 0.0, "linear", 2.0, 10)
    assert configured == [linear(3), linear(4)] and stored_rates == cosine != configured
    assert re.search(r"use_checkpoint_lr_scheduler: .*0\.001.*cosine", run_ranks(output_of_run, 1, stored)[0])
