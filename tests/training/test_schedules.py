"""Learning rates of the original system up to `lr_decay_iters`, clamped after it."""

import dataclasses
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpointing import CheckpointError
from megatron.launch import process_info
from megatron.neox_arguments import NeoXArgs
from megatron.training import start
from megatron.training.schedules import Schedule, build_schedule, resumed_schedule
from tests.pool import run_ranks
from tests.training.runs import ADAMW, BASE, GOLDEN, NEOX, begin, config

FOLDER = GOLDEN / "schedules"
META = json.loads((FOLDER / "eleuther_meta.json").read_text())
CASES = [name for name in META if (FOLDER / f"eleuther_{name}.npy").exists() or "values_before_failure" in META[name]]


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
    """min_lr bounds the decay only: a 125M model warms up over 3200 steps from 1.9e-7 although min_lr is
    6e-5."""
    schedule = Schedule(6e-4, 6e-5, "cosine", 3200.0, 320000)
    assert [schedule(s) for s in (1, 100, 3200)] == pytest.approx([1.875e-7, 1.875e-5, 6e-4], rel=1e-12)


def test_length_from_keys() -> None:
    args = {**BASE, "train_iters": 200, "warmup": 0.1, "lr_decay_style": "cosine"}
    assert build_schedule(NeoXArgs.from_dict({**args, "lr_decay_iters": 50})).end == 50
    part = build_schedule(NeoXArgs.from_dict({**args, "lr_decay_iters": None, "lr_decay_fraction": 0.5}))
    assert (part.end, part.warmup) == (100, 10.0)


NO_WARMUP = {key: value for key, value in BASE.items() if key != "warmup"}


def test_warmup_iters() -> None:
    args = NeoXArgs.from_dict({**NO_WARMUP, "train_iters": 200, "warmup_iters": 30})
    assert (build_schedule(args).warmup, build_schedule(args).end) == (30.0, 200)
    assert build_schedule(args)(15) == pytest.approx(args.lr / 2)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_lr_scaling(scaling: str, factor: float) -> None:
    """By the data-parallel size, 4 of 8 ranks; the smallest rate too."""
    values = {**BASE, "model_parallel_size": 2, "min_lr": 1e-4, "lr_scaling": scaling}
    schedule = build_schedule(NeoXArgs.from_dict(values).for_world(8))
    assert (schedule.start_lr, schedule.min_lr) == pytest.approx((1e-3 * factor, 1e-4 * factor), rel=1e-12)


SAVED = META["cosine_frac_warmup_N150"]["state_dict"]  # written by the original system


def resume(saved: dict[str, Any] | None = None, given: dict[str, Any] | None = None, **more: Any) -> Schedule:
    keys = {"train_iters": 150, "lr_decay_style": "cosine", "min_lr": 6e-5, "warmup": 0.01, **more}
    lr = {"optimizer": {"type": "Adam", "params": {"lr": keys.pop("lr", 6e-4)}}}
    if "warmup_iters" in keys:
        del keys["warmup"]
    args = NeoXArgs.from_dict({**NO_WARMUP, **lr, **keys}).for_world(1)
    state = SAVED if saved is None else saved
    return resumed_schedule(build_schedule(args), state, args, "there/global_step5", given or {})


def test_same_schedule_resumes() -> None:
    assert resume() == resume(override_lr_scheduler=True) == resume(use_checkpoint_lr_scheduler=True)
    assert resume().state_dict(SAVED["num_iters"]) == SAVED


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"lr": 1e-3}, r"optimizer.params.lr: start_lr 0.001 \(program\), but IT had 0.0006"),
        ({"min_lr": 1e-5}, r"min_lr: min_lr 1e-05 \(program\), but IT had 6e-05"),
        ({"warmup": 0.02}, r"warmup: warmup_iter 3.0 \(program\), but IT had 1.5"),
        ({"warmup_iters": 4}, r"warmup_iters: warmup_iter 4.0 \(program\), but IT had 1.5"),
        ({"lr_decay_iters": 160, "warmup": 0.009375}, r"lr_decay_iters: end_iter 160 \(program\), but IT had 150"),
        ({"train_iters": 300, "warmup": 0.005}, r"train_iters: end_iter 300 \(program\), but IT had 150"),
        ({"lr_decay_style": "linear"}, r"lr_decay_style: decay_style linear \(program\), but IT had cosine"),
    ],
)
def test_changed_schedule(change: dict[str, Any], line: str) -> None:
    line = line.replace("IT", "the run of there/global_step5")
    end = "; the learning-rate schedule .* override_lr_scheduler: .* use_checkpoint_lr_scheduler: true with that one$"
    with pytest.raises(CheckpointError, match=f"^{line}{end}"):
        resume(**change)
    assert resume(**change, use_checkpoint_lr_scheduler=True) == resume()
    assert resume(**change, override_lr_scheduler=True) != resume()


def test_the_key_that_changed_is_named_not_what_follows_from_it() -> None:
    """Where it is known what was written: both a warm-up that is a share of the run and its end come of its
    length."""
    then = {"train_iters": 150, "warmup": 0.01, "lr_scaling": "none"}
    message = r"^train_iters: end_iter 300 \(program\), but .* had 150; train_iters: warmup_iter 3.0 .* had 1.5; the le"
    with pytest.raises(CheckpointError, match=message):
        resume(given=then, train_iters=300)
    with pytest.raises(CheckpointError, match="^optimizer.params.lr: start_lr 0.001"):
        resume(given={**then, "optimizer": {"params": {"lr": 6e-4}}}, lr=1e-3, lr_scaling="none")


def test_schedules_that_do_not_differ() -> None:
    """A constant rate has no end and no minimum; checkpoints of other tools may hold no schedule."""
    constant = {**SAVED, "decay_style": "constant", "warmup_iter": 0.0}
    assert resume(constant, lr_decay_style="constant", warmup=0.0, train_iters=300, min_lr=0.0).end == 300
    assert resume({}) == resume()
    with pytest.raises(CheckpointError, match="holds no learning-rate schedule; remove use_checkpoint_lr_scheduler"):
        resume({}, use_checkpoint_lr_scheduler=True)


def test_wsd_is_kept_whole() -> None:
    """NeoX's entries say nothing of the final decay; ours do."""
    wsd = {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "minus_sqrt"}
    state = resume(**wsd, override_lr_scheduler=True).state_dict(5)
    assert resume(state, use_checkpoint_lr_scheduler=True) == resume(state, **wsd)
    with pytest.raises(
        CheckpointError, match=r"lr_wsd_decay_iters: wsd_decay_iters 30 .* had 20; .*style linear .* had minus_sqrt"
    ):
        resume(state, lr_decay_style="wsd", lr_wsd_decay_iters=30)


def test_runs_take_the_schedule_they_are_told(tmp_path: Path) -> None:
    first = config(NEOX, ADAMW, lr_decay_style="cosine", warmup=0.2, save=str(tmp_path), checkpoint_factor=3)
    run_ranks(_save, 1, first)
    changed = {**first, "save": None, "load": str(tmp_path), "lr_decay_style": "linear"}
    with pytest.raises(AssertionError, match=r"lr_decay_style: decay_style linear .* of \S+/global_step3 had cosine"):
        run_ranks(_resumed, 1, changed)
    ((configured, _),) = run_ranks(_resumed, 1, {**changed, "override_lr_scheduler": True})
    ((stored, output),) = run_ranks(_resumed, 1, {**changed, "use_checkpoint_lr_scheduler": True})
    assert (configured.style, stored.style) == ("linear", "cosine")
    assert dataclasses.replace(stored, style="linear") == configured
    assert "use_checkpoint_lr_scheduler: learning rate 0.001 after 2 steps of warm-up, cosine until step 10" in output


def _save(rank: int, world_size: int, values: dict[str, Any]) -> None:
    training = begin(values)
    training.progress.iteration, training.progress.consumed_samples = 3, 24
    training.checkpointer.save(training.progress)
    training.checkpointer.wait()


def _resumed(rank: int, world_size: int, values: dict[str, Any]) -> tuple[Schedule, str]:
    with redirect_stdout(io.StringIO()) as output:
        schedule = start(NeoXArgs.from_dict(values), process_info()).schedule
    return schedule, output.getvalue()
