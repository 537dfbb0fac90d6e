"""Every real configuration file trains, not only loads: made small by overrides, precision and kinds of
layers kept."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron.launch import process_info
from megatron.neox_arguments import ConfigError, load
from megatron.training import start
from megatron.training.loop import batches_of
from megatron.training.unlearning import lr_scale
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.real_files import FORK, NOT_HERE, UPSTREAM, WIDTHS, distinct, kinds_of, line_needed, small, written
from tests.training.runs import metric_rows

ROOT = Path(__file__).resolve().parents[2]
FILES = {**UPSTREAM, **FORK}
TRAINED = {name: values for name, values in FILES.items() if name not in NOT_HERE}
DISTINCT = [name for name, _ in distinct(TRAINED)]
KINDS = [name for name, _ in kinds_of(TRAINED)]
TOLERANCE = {"fp32": 1e-5, "bfloat16": 0.02, "fp16": 5e-3}
"""Of losses between layouts, relative: sums in another order, rounded to the precision of activations."""


def some_steps(rank: int, world: int, runs: list[tuple[str, dict[str, Any]]]) -> list[str | list[float]]:
    """For the pool: losses of the steps of each file, or why it was refused."""
    results: list[str | list[float]] = []
    for path, overrides in runs:
        try:
            training = start(load([path], overrides).check_training(), process_info())
        except ConfigError as refused:
            results.append(str(refused))
            continue
        batches, losses = batches_of(training), []
        for step in range(training.args.train_iters):
            micro_batches = next(batches)
            rate = training.schedule(step) * lr_scale(training.args, micro_batches[0].role)
            losses.append(float(training.engine.train_step(micro_batches, rate).loss))
            training.progress.iteration += 1
        results.append(losses)
        training.engine.close()
    return results


def test_files_that_are_alike_are_tried_once() -> None:
    assert len(UPSTREAM) == 53 and len(FORK) == 54 and len(TRAINED) == 49 + 54
    assert sum(len(names) for _, names in distinct(TRAINED)) == len(TRAINED) and 30 < len(DISTINCT) < 70


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_a_file_needs_no_line_but_for_a_width_with_several_readings(name: str, tmp_path: Path) -> None:
    assert line_needed(written(tmp_path, name, FILES[name])).get("compat_ffn_width") == WIDTHS.get(name)


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_what_is_not_here_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load([written(tmp_path, name, FILES[name])], {"train_batch_size": 8}).check_training()
    assert any(NOT_HERE[name] in line for line in refused.value.problems), refused.value.problems


def runs_of(folder: Path, names: Iterable[str], **more: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each file as it is written, and overrides that make it small."""
    paths = {name: written(folder, name, FILES[name]) for name in names}
    return [(str(path), {**small(FILES[name]), **line_needed(path), **more}) for name, path in paths.items()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [KINDS[::3], pytest.param(KINDS, marks=pytest.mark.more), pytest.param(DISTINCT, marks=pytest.mark.product)],
    ids=["some", "kinds", "every file"],
)
def test_every_file_trains_as_it_is_written(names: list[str], tmp_path: Path) -> None:
    """Kinds: one of files that differ in rates, intervals and sizes of buffers only."""
    results = run_ranks(some_steps, 1, runs_of(tmp_path, names), timeout=590)[0]
    for name, losses in zip(names, results, strict=True):
        assert not isinstance(losses, str) and all(0 < loss < 20 for loss in losses[:2]), (name, losses)
        assert abs(losses[2]) < 20 * FILES[name].get("gd_retain_weight", 1), (name, losses)  # it may unlearn


LAYOUTS: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"model_parallel_size": 2}), (2, {"pipe_parallel_size": 2})]
UNLEARNING = [name for name, _ in kinds_of({name: FORK[name] for name in sorted(FORK) if "ga_dataset" in FORK[name]})]
# Four steps that alternate, of which the third is one on the forget set.
ALTERNATING = {"train_iters": 4, "ga_interleave_ratio": 1}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("names", "more"),
    [
        pytest.param(KINDS[1::6], {}, marks=pytest.mark.more),
        pytest.param(KINDS, {}, marks=pytest.mark.product),
        pytest.param(UNLEARNING, ALTERNATING, marks=pytest.mark.product),
    ],
    ids=["some", "kinds", "unlearning"],
)
def test_files_in_layouts(names: list[str], more: dict[str, Any], tmp_path: Path) -> None:
    """Losses of one process, of which every other run has those in tp2, and the rest in pp2."""
    runs = runs_of(tmp_path, names, **more)
    alone = run_ranks(some_steps, 1, runs, timeout=880)[0]
    for i, (ranks, keys) in enumerate(LAYOUTS[1:]):
        ours = run_ranks(some_steps, ranks, [(path, {**given, **keys}) for path, given in runs[i::2]], timeout=880)[0]
        for (path, overrides), theirs, losses in zip(runs[i::2], alone[i::2], ours, strict=True):
            assert losses == pytest.approx(theirs, rel=TOLERANCE[load([path], overrides).precision]), (keys, path)
    for (path, _), losses in zip(runs, alone, strict=True):
        if more is ALTERNATING:
            assert losses[2] > 100 if "gdiff" in path else losses[2] < 0, (path, losses)
            assert all(0 < losses[step] < 20 for step in (0, 1, 3)), (path, losses)


AS_COMMANDS = KINDS[1::25]
"""In each of the layouts of two ranks one."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", with_more(KINDS, *AS_COMMANDS, product=set(KINDS) - set(AS_COMMANDS)))
def test_typed_as_a_command(name: str, tmp_path: Path) -> None:
    """In one of the layouts, by turns, with the losses that the file has alone."""
    ((path, overrides),) = runs_of(tmp_path, [name])
    ranks, keys = LAYOUTS[KINDS.index(name) % 3]
    places = {"save": str(tmp_path), "tensorboard_dir": f"{tmp_path}/tb", "log_dir": f"{tmp_path}/logs"}
    places |= {"num_gpus": ranks, "log_interval": 1}  # for the losses to be read
    if not FILES[name].get("checkpoint_factor") and not FILES[name].get("extra_save_iters"):
        places["checkpoint_factor"] = 3  # GPT-NeoX asks for it beside save
    words = [f"{key}={json.dumps(value)}" for key, value in (overrides | places | keys).items()]
    command = [sys.executable, str(ROOT / "deepy.py"), "train.py", path, "--set", *words]
    env = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0 and "run finished at iteration 3" in done.stdout, done.stderr[-3000:]
    losses = [row["train/lm_loss"] for row in metric_rows(tmp_path)]
    alone = run_ranks(some_steps, 1, [(path, overrides)])[0][0]
    assert losses == pytest.approx(alone, rel=TOLERANCE[load([path], overrides).precision])
