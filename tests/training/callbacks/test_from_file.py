"""`callbacks`: a user's own take part in a run of train.py; what is wrong with them is said at the start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.callbacks import Callback
from tests.pool import run_ranks
from tests.training.runs import LLAMA, config
from tests.training.test_bad_input import call_train

RECORDER = '''
import json
import os
from pathlib import Path

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
    """What the recorder of a rank has noted."""
    return json.loads((folder / f"calls_{rank}.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_method_is_called(ranks: int, tmp_path: Path) -> None:
    for code, printed in run_ranks(call_train, ranks, arguments(tmp_path), init=False, timeout=120):
        assert code == 0, printed

    def step(number: int) -> list[list[Any]]:
        begun = [["on_step_start", number - 1, 4 // ranks], ["gradients"]]
        evaluated = [["on_validation_end", number], ["on_save", number, False]] if number % 2 == 0 else []
        return [*begun, *evaluated, ["on_step_end", number, True]]

    expected = [["on_train_start", 0], ["on_validation_end", 0], ["on_step_end", 0, False]]
    expected += [call for number in range(1, 5) for call in step(number)] + [["close"]]
    for rank in range(ranks):
        assert calls(tmp_path, rank) == expected
    rows = [json.loads(line) for line in (tmp_path / "run" / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["mine/doubled"] for row in rows] == [2 * row["validation/lm_loss"] for row in rows] and len(rows) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_asks_for_all(ranks: int, tmp_path: Path) -> None:
    """To save after step 1, to stop after step 3; the answer comes a step later, over several ranks two."""
    settings = ("train_iters=20", "checkpoint_factor=100", "eval_interval=100")
    for asked, request in (("save", 1), ("stop", 3)):
        part = {asked: request, "rank": ranks - 1}
        save = f"save={tmp_path}/{asked}"
        argv = arguments(tmp_path, *settings, save, f"exit_interval={8 if asked == 'save' else 'null'}", part=part)
        for code, printed in run_ranks(call_train, ranks, argv, init=False, timeout=120):
            assert code == 0, printed
        at = request + ranks
        for rank in range(ranks):
            saves = [call[1] for call in calls(tmp_path, rank) if call[0] == "on_save"]
            assert saves == ([at, 8] if asked == "save" else [at])
    status = json.loads((tmp_path / "stop" / "status.json").read_text())
    reason = "enough" if ranks == 1 else "a callback of another rank asked for it"
    assert (status["status"], status["iteration"], status["reason"]) == ("stopped", 3 + ranks, reason)


def fail(rank: int, world_size: int, argv: list[str]) -> None:
    """For the pool: train.py, whose run fails."""
    with pytest.raises(ValueError, match="on purpose"):
        call_train(rank, world_size, argv)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_is_told_before_the_end(ranks: int, tmp_path: Path) -> None:
    run_ranks(fail, ranks, arguments(tmp_path, part={"fail": 3}), init=False, timeout=120)
    for rank in range(ranks):
        assert calls(tmp_path, rank)[-3:] == [
            ["on_step_end", 3, True], ["on_error", "ValueError: on purpose"], ["close"]
        ]  # fmt: skip
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "ValueError: on purpose")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("gone.py:Recorder", r"gone\.py:Recorder: {folder}/gone\.py: no such file"),
        ("mine.py:Gone", r"mine\.py:Gone: the file has no class Gone"),
        ("mine.py:NoCallback", r"NoCallback is no subclass of megatron\.callbacks\.Callback"),
        ("mine.py:function", r"function is no subclass of megatron\.callbacks\.Callback"),
        ("broken.py:Recorder", r"broken\.py cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)"),
        ("mine.py:Fails", r"Fails\(\) failed \(OSError: no such board\)"),
        ("mine.py", r"mine\.py: expected FILE\.py:CLASS"),
    ],
)
def test_what_is_wrong_is_said(entry: str, message: str, tmp_path: Path) -> None:
    """In one line that begins with the key's place; on every rank alike."""
    (tmp_path / "broken.py").write_text("import nowhere\n")
    argv = arguments(tmp_path, f"callbacks=[{tmp_path}/{entry}]")
    ranks = 2 if entry.endswith("Gone") else 1
    for code, printed in run_ranks(call_train, ranks, argv, init=False, timeout=120):
        assert code == 1 and len(printed.strip().splitlines()) == 1, printed
        assert "callbacks: " in printed and re.search(message.replace("{folder}", re.escape(str(tmp_path))), printed)


def test_nothing_is_done_by_default() -> None:
    methods = [name for name in vars(Callback) if not name.startswith("_")]
    assert methods == [
        "on_train_start", "on_step_start", "on_step_end", "on_validation_end", "on_save", "on_error", "close",
    ]  # fmt: skip
