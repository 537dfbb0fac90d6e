"""A run that was told to stop or was killed, at any step or while it saved, goes on bit for bit when started
again."""

import json
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import verify
from tests.pool import run_ranks
from tests.soak.kills import (
    LAYOUTS,
    SAVE_EVERY,
    SAVING,
    STEPS,
    run_and_die_at,
    run_and_die_saving,
    run_and_get_signal,
    values,
)
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import run_to_end

# Once in `make test`, five times in `make soak`.
TIMES = [0, *(pytest.param(i, marks=pytest.mark.soak) for i in range(1, 6))]
QUICK = list(zip(("plain", "tp2", "zero1", "pp2", "zero1"), SAVING, strict=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses by step of a run that nothing happens to."""
    known: dict[str, dict[int, float]] = {}

    def run(layout: str) -> dict[int, float]:
        if layout not in known:
            save = tmp_path_factory.mktemp(layout) / "run"
            run_ranks(run_to_end, LAYOUTS[layout][0], values(save, layout))
            known[layout] = losses(save)
            assert list(known[layout]) == list(range(1, STEPS + 1))
        return known[layout]

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("time", TIMES)
def test_at_a_random_step(time: int, layout: str, number: signal.Signals, undisturbed: Any, tmp_path: Path) -> None:
    ranks, save = LAYOUTS[layout][0], tmp_path / "run"
    step, to = random.randint(1, STEPS), random.randrange(ranks)
    what = f"{number.name} to rank {to} in step {step}"
    start = partial(run_ranks, run_and_get_signal, ranks, values(save, layout), number, step, to)
    if number == signal.SIGTERM:
        start()
        state = json.loads((save / "status.json").read_text())
        # Other ranks hear of it one step later; then the run may be over already.
        stopped = min(step + (ranks > 1), STEPS)
        assert (state["iteration"], state["status"]) == (stopped, "stopped" if stopped < STEPS else "finished"), what
    else:
        with pytest.raises(AssertionError, match=f"rank {to} of {ranks} failed.*\n.*signal 9"):
            start()
        saved = sorted(path.name for path in save.glob("global_step*"))
        due = [f"global_step{i}" for i in range(SAVE_EVERY, step, SAVE_EVERY)]
        assert saved in (due, due[:-1]), f"{what}: the last one may not have been written yet"
    run_ranks(run_to_end, ranks, values(save, layout))
    assert losses(save) == undisturbed(layout), what


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("layout", "moment"),
    [
        (layout, moment) if (layout, moment) in QUICK else pytest.param(layout, moment, marks=pytest.mark.soak)
        for layout in LAYOUTS
        for moment in SAVING
    ],
)
def test_while_saving(layout: str, moment: str, beside: bool, undisturbed: Any, tmp_path: Path) -> None:
    ranks, save = LAYOUTS[layout][0], tmp_path / "run"
    to = ranks - 1 if moment in ("copy", "write", "half a file") and layout != "zero1" else 0
    with pytest.raises(AssertionError, match=f"rank {to} of {ranks} failed.*\n.*signal 9"):
        run_ranks(run_and_die_saving, ranks, values(save, layout, async_save=beside), moment, to)
    assert (save / "latest").read_text() == f"global_step{SAVE_EVERY}"
    run_ranks(run_to_end, ranks, values(save, layout))
    assert losses(save) == undisturbed(layout)
    assert (save / "latest").read_text() == f"global_step{STEPS}"
    assert not [path.name for path in save.iterdir() if path.name.startswith(".tmp")]


@pytest.mark.parametrize("beside", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("ten", [pytest.param(False, id="two"), pytest.param(True, id="ten", marks=pytest.mark.soak)])
def test_at_random_moments_of_a_save(ten: bool, beside: bool, undisturbed: Any, tmp_path: Path) -> None:
    """Spread over copying, writing and renaming; each time the run goes on from the last whole checkpoint."""
    given = partial(values, layout="zero1", async_save=beside)
    count = run_ranks(run_and_die_at, 2, given(tmp_path / "count"), 0)[0]
    assert count > 20
    draws = 10 if ten else 2
    for i in range(draws):
        save = tmp_path / str(i)
        nth = random.randint(1 + i * count // draws, (i + 1) * count // draws)
        with pytest.raises(AssertionError, match="rank 0 of 2 failed.*\n.*signal 9"):
            run_ranks(run_and_die_at, 2, given(save), nth)
        whole = (save / "latest").read_text()
        assert whole in (f"global_step{SAVE_EVERY}", f"global_step{2 * SAVE_EVERY}"), f"moment {nth} of {count}"
        for path in save.glob("global_step*"):
            assert verify(path) is not None, f"moment {nth} of {count}"
        run_ranks(run_to_end, 2, given(save))
        assert losses(save) == undisturbed("zero1"), f"moment {nth} of {count}"


def test_a_killed_fine_tuning_goes_on_instead_of_beginning_again(tmp_path: Path) -> None:
    """`finetune` and `load` say how a run starts; what it has saved itself since comes first."""
    base = tmp_path / "base"
    run_ranks(run_to_end, 1, values(base, "plain", train_iters=2))
    for name in ("through", "killed"):
        tuning = values(tmp_path / name, "plain", load=str(base), finetune=True, seed=7, async_save=False)
        if name == "killed":
            with pytest.raises(AssertionError, match="signal 9"):
                run_ranks(run_and_get_signal, 1, tuning, signal.SIGKILL, 4, 0)
            assert (tmp_path / name / "latest").read_text() == "global_step2"
        run_ranks(run_to_end, 1, tuning)
    assert losses(tmp_path / "killed") == losses(tmp_path / "through")
    assert len(losses(tmp_path / "killed")) == STEPS
