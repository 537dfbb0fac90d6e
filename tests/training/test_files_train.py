"""Every real configuration file trains, not only loads: made small by overrides, precision and kinds of
layers kept."""

import json
import os
import subprocess
import sys
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


def test_files_that_are_alike_are_tried_once():
    assert len(UPSTREAM) == 53 and len(FORK) == 54 and len(TRAINED) == 49 + 54
    assert sum(len(names) for _, names in distinct(TRAINED)) == len(TRAINED) and 30 < len(DISTINCT) < 70


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_a_file_needs_no_line_but_for_a_width_with_several_readings(name, tmp_path):
    assert line_needed(written(tmp_path, name, FILES[name])).get("compat_ffn_width") == WIDTHS.get(name)


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_what_is_not_here_is_refused_by_name(name, tmp_path):
    with pytest.raises(ConfigError) as refused:
        load([written(tmp_path, name, FILES[name])], {"train_batch_size": 8}).check_training()
    assert any(NOT_HERE[name] in line for line in refused.value.problems), refused.value.problems


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", [KINDS, pytest.param(DISTINCT, marks=pytest.mark.more)], ids=["kinds", "every file"])
def test_every_file_trains_as_it_is_written(names, tmp_path, capsys):
    """By `make test` one of files that differ in rates, intervals and sizes of buffers only."""
    runs = []
    for name in names:
        path = written(tmp_path, name, FILES[name])
        runs.append((str(path), {**small(FILES[name]), **line_needed(path)}))
    results = dict(zip(names, run_ranks(some_steps, 1, runs, timeout=230)[0], strict=True))
    with capsys.disabled():
        lines = sum(name in WIDTHS for name in TRAINED)
        print(f"\nreal files: {len(TRAINED) - lines} train as written, {lines} with compat_ffn_width, "
              f"{len(NOT_HERE)} need what is not here")  # fmt: skip
    for name, losses in results.items():
        assert not isinstance(losses, str) and all(0 < loss < 20 for loss in losses[:2]), (name, losses)
        assert abs(losses[2]) < 20 * FILES[name].get("gd_retain_weight", 1), (name, losses)  # it may unlearn


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2": (2, {"model_parallel_size": 2}),
    "pp2": (2, {"pipe_parallel_size": 2}),
}


UNLEARNING = [name for name, _ in kinds_of({name: FORK[name] for name in sorted(FORK) if "ga_dataset" in FORK[name]})]


def in_turns(runs):
    """Losses of one process, of which every other run has those in tp2, and the rest in pp2."""
    alone = run_ranks(some_steps, 1, runs, timeout=290)[0]
    for i, layout in enumerate(("tp2", "pp2")):
        ranks, keys = LAYOUTS[layout]
        ours = run_ranks(some_steps, ranks, [(path, {**more, **keys}) for path, more in runs[i::2]], timeout=290)[0]
        for (path, overrides), theirs, losses in zip(runs[i::2], alone[i::2], ours, strict=True):
            assert losses == pytest.approx(theirs, rel=TOLERANCE[load([path], overrides).precision]), (layout, path)
    return alone


@pytest.mark.more
@pytest.mark.timeout(900)
def test_files_that_unlearn_in_layouts(tmp_path):
    """Four steps that alternate, of which the third is one on the forget set."""
    paths = {name: written(tmp_path, name, FILES[name]) for name in UNLEARNING}
    every = {"train_iters": 4, "ga_interleave_ratio": 1}
    runs = [(str(path), {**small(FILES[name]), **every}) for name, path in paths.items()]
    for (path, _), losses in zip(runs, in_turns(runs), strict=True):
        assert losses[2] > 100 if "gdiff" in path else losses[2] < 0, (path, losses)
        assert all(0 < losses[step] < 20 for step in (0, 1, 3)), (path, losses)


@pytest.mark.more
@pytest.mark.timeout(900)
def test_files_in_layouts(tmp_path):
    """One of each kind."""
    paths = {name: written(tmp_path, name, FILES[name]) for name in KINDS}
    in_turns([(str(path), {**small(FILES[name]), **line_needed(path)}) for name, path in paths.items()])


AS_COMMANDS = KINDS[::7]
"""Of each layout two; the others by `make test-all`."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", with_more(KINDS, *AS_COMMANDS, product=set(KINDS) - set(AS_COMMANDS)))
def test_typed_as_a_command(name, tmp_path):
    """In one of the layouts, by turns, with the losses that the file has alone."""
    path = written(tmp_path, name, FILES[name])
    overrides = {**small(FILES[name]), **line_needed(path)}
    ranks, keys = list(LAYOUTS.values())[KINDS.index(name) % 3]
    places = {"save": str(tmp_path), "tensorboard_dir": f"{tmp_path}/tb", "log_dir": f"{tmp_path}/logs"}
    places |= {"num_gpus": ranks, "log_interval": 1}  # for the losses to be read
    if not FILES[name].get("checkpoint_factor") and not FILES[name].get("extra_save_iters"):
        places["checkpoint_factor"] = 3  # GPT-NeoX asks for it beside save
    words = [f"{key}={json.dumps(value)}" for key, value in (overrides | places | keys).items()]
    command = [sys.executable, str(ROOT / "deepy.py"), "train.py", str(path), "--set", *words]
    env = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "run finished at iteration 3" in done.stdout, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    losses = [step["train/lm_loss"] for step in steps if "train/lm_loss" in step]
    alone = run_ranks(some_steps, 1, [(str(path), overrides)])[0][0]
    assert losses == pytest.approx(alone, rel=TOLERANCE[load([path], overrides).precision])
