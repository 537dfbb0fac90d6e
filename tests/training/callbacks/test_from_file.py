"""`callbacks`: a user's own take part in a run of train.py; what is wrong with them is said at the start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import metrics
from tests.training.runs import LLAMA, config
from tests.training.test_bad_input import call_train

RECORDER = '''
import json
from pathlib import Path

import torch

from megatron.callbacks import Callback

FOLDER = Path(__file__).parent

class Recorder(Callback):
    """Notes every call, and takes part in the run as the file `part.json` says."""

    def __init__(self):
        self.calls, self.part = [], json.loads((FOLDER / "part.json").read_text())

    def on_train_start(self, run):
        self.rank = run.groups.world_rank
        self.calls.append(["on_train_start", run.iteration])

    def on_step_start(self, run, batches):
        self.calls.append(["on_step_start", run.iteration, len(batches)])
        return lambda parts: self.calls.append(["gradients"])

    def on_step_end(self, run, step):
        self.calls.append(["on_step_end", step.iteration, step.result is not None])
        asks = self.rank == self.part.get("rank", 0)
        if step.iteration == self.part.get("stop") and asks:
            run.request_stop("enough")
        if step.iteration == self.part.get("save") and asks:
            run.request_save()
        if step.iteration == self.part.get("fail"):
            raise ValueError("on purpose")

    def on_validation_end(self, run, step):
        step.row["mine/doubled"] = 2 * step.row["validation/lm_loss"]
        self.calls.append(["on_validation_end", step.iteration])

    def on_save(self, run, step, ephemeral):
        self.calls.append(["on_save", step.iteration, ephemeral])

    def on_error(self, run, problem):
        self.calls.append(["on_error", f"{type(problem).__name__}: {problem}"])

    def close(self):
        self.calls.append(["close"])
        (FOLDER / f"calls_{self.rank}.json").write_text(json.dumps(self.calls))

class Counter(Callback):
    """Counts steps over all starts, in a tensor; `part.json` may let it keep what no checkpoint can."""

    def __init__(self):
        self.steps, self.part = torch.zeros(1), json.loads((FOLDER / "part.json").read_text())

    def on_step_end(self, run, step):
        self.steps += step.result is not None

    def on_completed_run(self, run):
        self.rank = run.groups.world_rank
        (FOLDER / f"completed_{self.rank}").touch()

    def close(self):
        if self.part.get("close") is not None:
            with open(FOLDER / f"closed_{self.rank}", "a") as file:
                file.write("closed ")
            raise OSError(self.part["close"])

    def on_save(self, run, step, ephemeral):
        (FOLDER / f"steps_{step.iteration}_{run.groups.world_rank}").write_text(str(int(self.steps)))

    def state(self):
        return {"steps": self.steps.clone(), "names": ["a", None], "path": Path("x") if self.part.get("path") else "x"}

    def load_state(self, state):
        assert state["names"] == ["a", None] and state["path"] == "x"
        self.steps = state["steps"]

class NoCallback:
    pass

class Fails(Callback):
    def __init__(self):
        raise OSError("no such board")

def function():
    pass
'''


def arguments(folder: Path, *settings: str, part: dict[str, Any] | None = None) -> list[str]:
    """train.py's command line for four steps with the recorder, which plays a part."""
    (folder / "mine.py").write_text(RECORDER)
    (folder / "part.json").write_text(json.dumps(part or {}))
    values = config(LLAMA, num_layers=2, train_iters=4, checkpoint_factor=2, eval_iters=1, eval_interval=2)
    values |= {"save": str(folder / "run"), "load": None, "callbacks": [f"{folder}/mine.py:Recorder"]}
    (folder / "a.yml").write_text(yaml.safe_dump({**values, "train_micro_batch_size_per_gpu": 2}))
    return [str(folder / "a.yml"), "--set", "log_interval=2", *settings]


def calls(folder: Path, rank: int = 0) -> list[list[Any]]:
    return json.loads((folder / f"calls_{rank}.json").read_text())


def test_every_method_is_called(tmp_path: Path) -> None:
    for code, printed in run_ranks(call_train, 2, arguments(tmp_path), init=False):
        assert code == 0, printed

    def step(number: int) -> list[list[Any]]:
        start_calls = [["on_step_start", number - 1, 2], ["gradients"]]
        evaluated = [["on_validation_end", number], ["on_save", number, False]] if number % 2 == 0 else []
        return [*start_calls, *evaluated[:1], ["on_step_end", number, True], *evaluated[1:]]

    expected = [["on_train_start", 0], ["on_validation_end", 0], ["on_step_end", 0, False]]
    expected += [call for number in range(1, 5) for call in step(number)] + [["close"]]
    assert calls(tmp_path, 0) == calls(tmp_path, 1) == expected
    rows = metrics(tmp_path / "run")
    assert [row["mine/doubled"] for row in rows] == [2 * row["validation/lm_loss"] for row in rows] and len(rows) == 3


@pytest.mark.parametrize(("ranks", "request_"), [(1, "stop"), (2, "stop"), (2, "save")])
def test_one_rank_asks_for_all(ranks: int, request_: str, tmp_path: Path) -> None:
    """To save or to stop after step 2; the answer comes a step later, over several ranks two."""
    settings = ("train_iters=20", "checkpoint_factor=100", "eval_interval=100", "exit_interval=6")
    argv = arguments(tmp_path, *settings, part={request_: 2, "rank": ranks - 1})
    for code, printed in run_ranks(call_train, ranks, argv, init=False):
        assert code == 0, printed
    for rank in range(ranks):
        saves = [call[1] for call in calls(tmp_path, rank) if call[0] == "on_save"]
        assert saves == ([2 + ranks, 6] if request_ == "save" else [2 + ranks])
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    if request_ == "stop":
        assert (status["status"], status["iteration"]) == ("stopped", 2 + ranks)
        assert ("enough" if ranks == 1 else "another rank") in status["reason"]


def test_a_state_goes_into_checkpoints_and_on(tmp_path: Path) -> None:
    counters = f"callbacks=[{tmp_path}/mine.py:Counter,{tmp_path}/mine.py:Counter]"
    for settings in (("exit_interval=2",), ("async_save=true",), ()):
        argv = arguments(tmp_path, counters, "log_interval=1", f"load={tmp_path}/run", *settings)
        for code, printed in run_ranks(call_train, 2, argv, init=False):
            assert code == 0, printed
    assert {path.name: path.read_text() for path in tmp_path.glob("steps_*")} == {
        f"steps_{step}_{rank}": str(step) for step in (2, 4) for rank in (0, 1)
    }
    assert len(list(tmp_path.glob("completed_*"))) == 2, "the third start has nothing left to do"
    failing = arguments(tmp_path, counters, f"load={tmp_path}/run", part={"close": "no board"})
    run_ranks(failing_close, 2, failing, init=False)
    assert (tmp_path / "closed_0").read_text() == "closed closed ", "each is closed, whatever others raise"


def failing_close(rank: int, world_size: int, argv: list[str]) -> None:
    """For the pool: train.py, whose callbacks cannot be closed."""
    with pytest.raises(OSError, match="no board"):
        call_train(rank, world_size, argv)


def refused_state(rank: int, world_size: int, argv: list[str]) -> None:
    """For the pool: train.py, whose callback's state no checkpoint can hold."""
    with pytest.raises(TypeError, match=r"Counter.state\(\)\['path'\] is a PosixPath"):
        call_train(rank, world_size, argv)


def test_a_state_that_cannot_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    argv = arguments(tmp_path, f"callbacks=[{tmp_path}/mine.py:Counter]", part={"path": True})
    run_ranks(refused_state, 1, argv, init=False)
    assert not (tmp_path / "run" / "latest").exists()


def fail(rank: int, world_size: int, argv: list[str]) -> None:
    """For the pool: train.py, whose run fails."""
    with pytest.raises(ValueError, match="on purpose"):
        call_train(rank, world_size, argv)


def test_an_error_is_told_before_the_end(tmp_path: Path) -> None:
    run_ranks(fail, 2, arguments(tmp_path, part={"fail": 3}), init=False)
    for rank in range(2):
        last = [["on_step_end", 3, True], ["on_error", "ValueError: on purpose"], ["close"]]
        assert calls(tmp_path, rank)[-3:] == last
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "ValueError: on purpose")


def call_each(rank: int, world_size: int, argvs: list[list[str]]) -> list[tuple[int, str]]:
    """For the pool: train.py with each command line."""
    return [call_train(rank, world_size, argv) for argv in argvs]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """In one line that begins with the key's place; on every rank alike."""
    (tmp_path / "broken.py").write_text("import nowhere\n")
    wrong = {
        "mine.py:Gone": r"mine\.py:Gone: .*class Gone",
        "gone.py:Recorder": rf"gone\.py:Recorder: {re.escape(str(tmp_path))}/gone\.py: .*file",
        "mine.py:NoCallback": r"NoCallback .*megatron\.callbacks\.Callback",
        "mine.py:function": r"function .*megatron\.callbacks\.Callback",
        "broken.py:Recorder": r"broken\.py .*ModuleNotFoundError: No module named 'nowhere'",
        "mine.py:Fails": r"Fails\(\) .*OSError: no such board",
        "mine.py": r"mine\.py: .*FILE\.py:CLASS",
    }
    argvs = [arguments(tmp_path, f"callbacks=[{tmp_path}/{entry}]") for entry in wrong]
    outcomes = run_ranks(call_each, 1, argvs, init=False)[0]
    for (code, printed), message in zip(outcomes, wrong.values(), strict=True):
        assert code == 1 and len(printed.strip().splitlines()) == 1, printed
        assert "callbacks: " in printed and re.search(message, printed), printed
    for code, printed in run_ranks(call_train, 2, argvs[0], init=False):
        assert (code, printed) == outcomes[0]
