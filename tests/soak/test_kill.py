"""A run that was stopped or killed, at any step or while it saved, goes on bit for bit."""

import json
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import publish, verify
from megatron.training import train
from megatron.training.checkpoint import writer as saving
from megatron.training.deepspeed.optimizer_parts import OptimizerParts
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import ADAMW, NEOX, begin, config, run_to_end
from tests.training.runs import LAYOUTS as ALL_LAYOUTS

pytestmark = pytest.mark.ends_processes
LAYOUTS = {name: ALL_LAYOUTS[name] for name in ("plain", "tp2", "pp2", "zero1")}
STEPS, SAVE_EVERY = 6, 2
SAVING = ("copy", "write", "half a file", "rename", "latest")


def values(save: Path, layout: str, **overrides: Any) -> dict[str, Any]:
    """A short run with dropout, so that every generator counts."""
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    small = {"num_layers": 2, "train_micro_batch_size_per_gpu": 4, "train_iters": STEPS}
    save_keys = {"save": str(save), "load": str(save), "checkpoint_factor": SAVE_EVERY}
    return config(NEOX, ADAMW, dropout, LAYOUTS[layout][1], small, save_keys, overrides)


def run_and_get_signal(rank: int, world_size: int, run: dict[str, Any], number: int, step: int, to: int) -> None:
    """For the pool: rank `to` gets a signal as step `step` begins."""
    training = begin(run)
    train_step = training.engine.train_step

    def step_with_signal(*args: Any) -> Any:
        if rank == to and training.progress.iteration + 1 == step:
            os.kill(os.getpid(), number)
        return train_step(*args)

    training.engine.train_step = step_with_signal  # type: ignore[method-assign]
    train(training)


def run_and_die_saving(rank: int, world_size: int, run: dict[str, Any], moment: str | int, to: int = 0) -> int:
    """For the pool: rank `to` is killed in the second save.

    moment: weights are copied, a file or half of one is written, the directory is renamed, `latest` is
    written (rank 0); or before the nth thing that gathers state or changes the disk, 0: never. Returns how
    many there are.
    """
    training, num_saves, done = begin(run), [0], [0]
    engine, check = training.engine, training.checkpointer._check_space

    def counted_check(save: Path) -> bool:  # with `async_save` a save begins when the one before is on disk
        num_saves[0] += 1
        return check(save)

    def deadly(
        work: Callable[..., Any], *moments: str, dies_after: bool = False, counts: Any = None
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            is_here = rank == to and num_saves[0] == 2
            done[0] += is_here
            is_moment = is_here and moment in moments and (counts is None or counts(*args))
            if (is_moment and not dies_after) or (is_here and moment == done[0]):
                os.kill(os.getpid(), signal.SIGKILL)
            result = work(*args, **kwargs)
            if is_moment and moment == "half a file":
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
            if is_moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    # This process is the pool's throw-away fork.
    module, gather = __import__(publish.__module__, fromlist=["replace_file"]), engine.gather_weights
    training.checkpointer._check_space = counted_check  # type: ignore[method-assign]
    engine.gather_weights = deadly(lambda *words: iter(list(gather(*words))), "copy", dies_after=True)  # type: ignore
    saving.save_tensors = deadly(saving.save_tensors, "write", "half a file", dies_after=True)
    os.rename = deadly(os.rename, "rename", counts=lambda source, target: "global_step" in str(target))
    module.replace_file = deadly(module.replace_file, "latest", counts=lambda path, data: Path(path).name == "latest")
    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
    OptimizerParts._collect = deadly(OptimizerParts._collect)  # type: ignore[method-assign]
    train(training)
    assert moment == 0, f"the run did not come to: {moment}"
    return done[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses by step of a run that nothing happens to."""
    curves: dict[str, dict[int, float]] = {}

    def run(layout: str) -> dict[int, float]:
        if layout not in curves:
            save = tmp_path_factory.mktemp(layout) / "run"
            run_ranks(run_to_end, LAYOUTS[layout][0], values(save, layout))
            curves[layout] = losses(save)
            assert list(curves[layout]) == list(range(1, STEPS + 1))
        return curves[layout]

    return run


def goes_on_from_signal(number: signal.Signals, layout: str, step: int, to: int, save: Path, undisturbed: Any) -> None:
    ranks, case = LAYOUTS[layout][0], f"{number.name} to rank {to} in step {step}"
    start = partial(run_ranks, run_and_get_signal, ranks, values(save, layout), number, step, to)
    if number == signal.SIGTERM:
        start()
        state = json.loads((save / "status.json").read_text())
        # Other ranks hear of it one step later, or after a save; then the run may be over already.
        stopped = min(step + (ranks > 1 and step % SAVE_EVERY > 0), STEPS)
        assert (state["iteration"], state["status"]) == (stopped, "stopped" if stopped < STEPS else "finished"), case
        assert stopped == STEPS or number.name in state["reason"]
    else:
        with pytest.raises(AssertionError, match=f"rank {to} of {ranks} failed.*\n.*signal 9"):
            start()
        saved = sorted(path.name for path in save.glob("global_step*"))
        due = [f"global_step{i}" for i in range(SAVE_EVERY, step, SAVE_EVERY)]
        assert saved in (due, due[:-1]), f"{case}: the last one may not have been written yet"
    run_ranks(run_to_end, ranks, values(save, layout))
    assert losses(save) == undisturbed(layout), case
    assert json.loads((save / "status.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("layout", "number", "step"), [("tp2", signal.SIGTERM, 3), ("zero1", signal.SIGKILL, 5), ("pp2", signal.SIGTERM, 4)]
)
def test_at_a_step(layout: str, number: signal.Signals, step: int, undisturbed: Any, tmp_path: Path) -> None:
    goes_on_from_signal(number, layout, step, LAYOUTS[layout][0] - 1, tmp_path / "run", undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("time", range(6))
def test_at_a_random_step(time: int, layout: str, number: signal.Signals, undisturbed: Any, tmp_path: Path) -> None:
    step, to = random.randint(1, STEPS), random.randrange(LAYOUTS[layout][0])
    goes_on_from_signal(number, layout, step, to, tmp_path / "run", undisturbed)


QUICK = list(zip(("plain", "tp2", "zero1", "plain", "zero1"), SAVING, strict=True))


@pytest.mark.parametrize(("layout", "moment", "async_save"), [
    pytest.param(*cell, async_save, marks=() if async_save and cell in QUICK else pytest.mark.soak)
    for cell in ((layout, moment) for layout in LAYOUTS for moment in SAVING)
    for async_save in (True, False)
])  # fmt: skip
def test_while_saving(layout: str, moment: str, async_save: bool, undisturbed: Any, tmp_path: Path) -> None:
    ranks, save = LAYOUTS[layout][0], tmp_path / "run"
    to = ranks - 1 if moment in ("copy", "write", "half a file") and layout != "zero1" else 0
    with pytest.raises(AssertionError, match=f"rank {to} of {ranks} failed.*\n.*signal 9"):
        run_ranks(run_and_die_saving, ranks, values(save, layout, async_save=async_save), moment, to)
    assert (save / "latest").read_text() == f"global_step{SAVE_EVERY}"
    run_ranks(run_to_end, ranks, values(save, layout))
    assert losses(save) == undisturbed(layout)
    assert (save / "latest").read_text() == f"global_step{STEPS}"
    assert not [path.name for path in save.iterdir() if path.name.startswith(".tmp")]


@pytest.mark.soak
@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_at_random_moments_of_a_save(async_save: bool, undisturbed: Any, tmp_path: Path) -> None:
    """Spread over copying, writing and renaming; each time the run goes on from the last whole checkpoint."""
    run_values, draws = partial(values, layout="zero1", async_save=async_save), 10
    count = run_ranks(run_and_die_saving, 2, run_values(tmp_path / "count"), 0)[0]
    assert count > 20
    for i in range(draws):
        save = tmp_path / str(i)
        nth = random.randint(1 + i * count // draws, (i + 1) * count // draws)
        with pytest.raises(AssertionError, match="rank 0 of 2 failed.*\n.*signal 9"):
            run_ranks(run_and_die_saving, 2, run_values(save), nth)
        latest = (save / "latest").read_text()
        assert latest in (f"global_step{SAVE_EVERY}", f"global_step{2 * SAVE_EVERY}"), f"moment {nth} of {count}"
        for path in save.glob("global_step*"):
            assert verify(path) is not None, f"moment {nth} of {count}"
        run_ranks(run_to_end, 2, run_values(save))
        assert losses(save) == undisturbed("zero1"), f"moment {nth} of {count}"
