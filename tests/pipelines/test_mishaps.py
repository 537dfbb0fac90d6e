"""Mishaps of a pipeline: full disks, removed logs, processes left behind, files edited meanwhile."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.pipelines.definition import read_pipeline
from megatron.pipelines.digests import weights_digest
from megatron.pipelines.gate_verdicts import gates_of
from megatron.pipelines.options import Options
from megatron.pipelines.stage_work import StageWork
from megatron.pipelines.state import DONE, FAILED, PROMOTED, State
from megatron.pipelines.table import rows_of
from tests.launch.runs import DEEPY, ROOT, environment
from tests.marks import with_more
from tests.pipelines.small import GATES, command, pipeline, write_small, write_yaml
from tests.process.test_commands import read_by_nobody

DATA = {"kind": "data", "outputs": ["made"]}


def write_data_pipeline(folder: Path, *commands: str) -> Path:
    """A pipeline of one data stage."""
    return write_small(folder, {"data": {**DATA, "commands": list(commands)}}, {})


def judged(folder: Path) -> State:
    """A pipeline whose stage `pretrain` has weights of four steps, made without training."""
    write_small(folder)
    checkpoint = folder / "checkpoints/pretrain/global_step4"
    checkpoint.mkdir(parents=True)
    (folder / "checkpoints/pretrain/logs").mkdir()
    (checkpoint / "manifest.json").write_text(json.dumps({"files": {"layer_a": {"sha256": "0" * 64, "size": 0}}}))
    (checkpoint / "layer_a").touch()
    row = {"iteration": 4, "consumed_tokens": 1, "train/lm_loss": 2.0}
    (folder / "checkpoints/pretrain/logs/metrics.jsonl").write_text(json.dumps(row) + "\n")
    state = State(folder)
    state.file = "pipeline.yml"
    state.update(
        "pretrain", weights={"checkpoint": "checkpoints/pretrain/global_step4", "sha256": weights_digest(checkpoint)}
    )
    return state


def work_on(folder: Path, state: State, messages: list[str]) -> StageWork:
    definition = read_pipeline(folder / "pipeline.yml")
    return StageWork(
        definition,
        definition.stage("pretrain"),
        Options(),
        gates_of(definition).get("pretrain"),
        state,
        messages.append,
    )


def test_removed_logs_stop_neither_status_nor_a_run(tmp_path: Path) -> None:
    state, messages = judged(tmp_path), list[str]()
    work = work_on(tmp_path, state, messages)
    work.judge_and_promote()
    assert state["pretrain"].status == PROMOTED and (tmp_path / state["pretrain"].verdict).is_file()
    for damage in ("half", "gone"):
        verdict = tmp_path / state["pretrain"].verdict
        verdict.write_text(verdict.read_text()[:30]) if damage == "half" else verdict.unlink()
        gate = {row["stage"]: row["gate"] for row in rows_of(work.pipeline, state, works=False)}["pretrain"]
        assert "pass" in gate and "pretrain-1" in gate and "gone" in gate, damage
    (tmp_path / "checkpoints/pretrain_final").resolve().joinpath("verdict.json").unlink()
    gate = {row["stage"]: row["gate"] for row in rows_of(work.pipeline, state, works=False)}["pretrain"]
    assert "unknown" in gate and "gate pretrain" in gate


@pytest.mark.parametrize(
    ("edited", "expected"),
    [({"require": [{"metric": "train/lm_loss", "max": 1.0}]}, "next `run`"), ({"require": [{"max": 1}]}, "refused")],
)
def test_a_gate_edited_during_its_stage_is_reported(tmp_path: Path, edited: object, expected: str) -> None:
    state, messages = judged(tmp_path), list[str]()
    work = work_on(tmp_path, state, messages)
    write_yaml(tmp_path / "gates.yml", {**GATES, "pretrain": edited})
    work.judge_and_promote()
    (line,) = [line for line in messages if "gates.yml was edited" in line]
    assert expected in line and state["pretrain"].status == PROMOTED, "by the gate as it was"


@pytest.mark.parametrize("word", with_more(["run", "resume"], "run", product=["resume"]))
def test_it_outlives_who_reads_what_it_says(word: str, tmp_path: Path) -> None:
    """As `| tee` that has ended: the exit code is that of the stages."""
    folder = write_data_pipeline(tmp_path / "p", "test -e ready && touch made")
    assert pipeline("run", folder).returncode == 1
    for code in (1, 0):
        assert read_by_nobody(command(word, folder), tmp_path, stderr=subprocess.STDOUT).returncode == code
        assert State(folder)["data"].status == (FAILED if code else DONE)
        (folder / "ready").touch()


@pytest.mark.more
def test_nothing_outlives_its_command(tmp_path: Path) -> None:
    """In sessions of their own, without our variables, and deaf to SIGTERM."""
    sleeps = "trap '' TERM; sleep 1000 & echo $! >> pids; echo $$ >> pids; wait"
    left = f"setsid env -i bash -c {shlex.quote(sleeps)} >/dev/null 2>&1 &"
    folder = write_data_pipeline(
        tmp_path / "p", f"{left} while test $(wc -l < pids || echo 0) -lt 2; do sleep 0.1; done", "touch made"
    )
    (folder / "pids").touch()
    done = pipeline("run", folder)
    assert done.returncode == 0 and re.search(r"data: warning: .*bash \(\d+\)", done.stderr), done.stderr
    for pid in (folder / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()
    assert pipeline("run", folder).returncode == 0, "its lock is free"


@pytest.mark.more
def test_an_edited_pipeline_is_reported(tmp_path: Path) -> None:
    stages = {name: {**DATA, "commands": ["echo '# more' >> pipeline.yml; touch made"]} for name in ("a", "b")}
    done = pipeline("run", write_small(tmp_path / "p", stages, {}))
    assert done.returncode == 0 and "b: warning:" in done.stderr and "pipeline.yml was edited" in done.stderr


FULL = """
import subprocess, sys
from pathlib import Path
from tests.disks import fill
from tests.pipelines.small import write_small
folder = Path(sys.argv[1])
write_small(folder, {"data": {"kind": "data", "outputs": ["made"], "commands": ["touch made"]}}, {})
filled = fill(folder)
for word in ("run", "status", "run"):
    done = subprocess.run([*sys.argv[2:], "pipeline", word, str(folder)], stderr=subprocess.STDOUT)
    print("rc", done.returncode, flush=True)
    if word == "status":
        filled.unlink()
"""


@pytest.mark.more
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """The same command does all once there is room again."""
    disk, copies = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.disks",
        str(disk),
        "300",
        str(copies),
        sys.executable,
        "-c",
        FULL,
        str(disk),
    ]
    done = subprocess.run([*command, *DEEPY], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=290)
    assert re.findall(r"rc (\d+)", done.stdout) == ["1", "0", "0"], done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if "error: " in line]
    assert len(errors) == 1 and "pipeline_state.json" in errors[0] and os.strerror(28) in errors[0]
    assert "Traceback" not in done.stdout and (copies / "made").is_file()
