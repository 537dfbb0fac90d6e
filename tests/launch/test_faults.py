"""Real runs of `deepy.py train.py` on two ranks: healthy, crashed, stopped, killed. Their log is an
interface."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.training.runs import LLAMA, config

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
# train.py, but rank 1 fails in step 7.
CRASHING = """\
import os, sys
import train
from megatron.training.native.engine import NativeEngine
def broken(self, *given, count=[0], step=NativeEngine.train_step):
    count[0] += 1
    if count[0] == 7 and os.environ["RANK"] == "1":
        raise ValueError("rank one is ill")
    return step(self, *given)
NativeEngine.train_step = broken
sys.exit(train.main())
"""
# train.py, but in step 3 nothing more goes onto the disk.
FILLING = """\
import os, sys
from pathlib import Path
import train
from megatron.training.native.engine import NativeEngine
from tests.disks import fill
def filled(self, *given, count=[0], step=NativeEngine.train_step):
    count[0] += 1
    if count[0] == 3 and os.environ["RANK"] == "1":
        fill(Path("disk"))
    return step(self, *given)
NativeEngine.train_step = filled
sys.exit(train.main())
"""
# train.py, but at first rank 1 waits in step 13, so that the next checkpoint does not come before a signal
# does.
WAITING = """\
import os, sys, time
import train
from megatron.training.native.engine import NativeEngine
def waiting(self, *given, count=[0], step=NativeEngine.train_step):
    count[0] += 1
    if count[0] == 13 and os.environ["RANK"] == "1" and os.environ["NEOX_RESTARTS"] == "0":
        time.sleep(120)
    return step(self, *given)
NativeEngine.train_step = waiting
sys.exit(train.main())
"""


class Ended(NamedTuple):
    """log: file with all that was printed; seconds: from the signal to the end of everything; pids: of the
    ranks."""

    code: int
    log: Path
    seconds: float
    pids: list[int]
    save: Path

    def losses(self) -> dict[int, float]:
        rows = [json.loads(line) for line in (self.save / "logs" / "metrics.jsonl").read_text().splitlines()]
        losses = [(row["iteration"], row["train/lm_loss"]) for row in rows if "train/lm_loss" in row]
        assert len(losses) == len(dict(losses)), "each step stands once"
        return dict(losses)


def run(folder: Path, *words: str, script: str = "train.py", hit: tuple[int, int] | None = None, **more: Any) -> Ended:
    """A run of STEPS steps that saves and validates on the way. hit: (signal, rank), sent after step 11."""
    save = folder / "sf_model_organisms" / "exp_1" / "run"
    values = config(
        LLAMA, train_iters=STEPS, save=str(save), load=str(save), checkpoint_factor=5, model_parallel_size=2,
        num_gpus=2, eval_iters=2, eval_interval=10, split="80,10,10", num_workers=0, **more,
    )  # fmt: skip
    (folder / "model.yml").write_text(yaml.safe_dump(values))
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT", "DS_ACCELERATOR")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if hit:
        script = str(folder / "waiting.py")
        Path(script).write_text(WAITING)
    command = [sys.executable, str(ROOT / "deepy.py"), script, str(folder / "model.yml"), *words]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **both)
    overdue = threading.Timer(150, process.kill)
    overdue.start()
    log, since, ranks = folder / "job.log", time.monotonic(), {}
    try:
        assert process.stdout is not None
        with log.open("a", buffering=1) as file:
            for line in process.stdout:
                file.write(line)
                if not ranks and hit is not None and re.search(r"iteration +11/", line):
                    ranks = ranks_of(process.pid)
                    since = time.monotonic()
                    os.kill(ranks[hit[1]], hit[0])
        return Ended(process.wait(), log, time.monotonic() - since, list(ranks.values()), save)
    finally:
        overdue.cancel()
        process.kill()
        process.wait()


def ranks_of(launcher: int) -> dict[int, int]:
    """Process id of each rank."""
    pids = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    ranks = {pid: re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes()) for pid in pids}
    return {int(match[1]): pid for pid, match in ranks.items() if match}


def bash(command: str, log: Path) -> tuple[int, str]:
    """A line as people type it, with the name of the log in its place: exit code and output."""
    done = subprocess.run(["bash", "-c", command.replace("<log>", str(log))], capture_output=True, text=True)
    return done.returncode, done.stdout


CRASHED = 'tail -100 <log> | grep -qi "traceback\\|exception\\|error:"'
ANY_TROUBLE = 'grep -i "error\\|exception\\|traceback" <log>'
EXPERIMENT = "grep -oE 'sf_model_organisms/[^/\"]+' <log> | head -1"
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks through /proc")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """A run in two parts: stopped by exit_interval, gone on, tested at the end; one log."""
    folder = tmp_path_factory.mktemp("healthy")
    first = run(folder, "--set", "exit_interval=15")
    assert first.code == 0, first.log.read_text()
    yield run(folder)


def every_row(log: Path) -> None:
    """Rows 7 to 11 on the log of a run that failed: progress, loss and experiment can be read, trouble is
    found."""
    assert re.search(r"lm_loss: \d", bash('grep "iteration.*lm_loss" <log>', log)[1])
    for pattern in (r"iteration\s+\K\d+", r"iteration\s+\d+/\s*\K\d+", r"lm_loss: \K[0-9.E+-]+"):
        loss = bash(f"""grep "iteration.*lm_loss:" <log> | tail -1 | grep -oP '{pattern}'""", log)[1]
        assert float(loss) > 0
    assert bash(EXPERIMENT, log) == (0, "sf_model_organisms/exp_1\n")
    assert bash(ANY_TROUBLE, log)[0] == 0
    assert bash(CRASHED, log)[0] == 0
    assert time.time() - int(bash("stat -c %Y <log>", log)[1]) < 600


def test_the_log_of_a_healthy_run_answers_every_question(healthy: Ended) -> None:
    log = healthy.log
    assert healthy.code == 0
    assert bash(ANY_TROUBLE, log) == (1, "")
    assert bash(CRASHED, log)[0] == 1
    code, lines = bash('grep "iteration.*lm_loss" <log>', log)
    assert code == 0 and len(re.findall(r"lm_loss: \d", lines)) == STEPS
    assert (
        bash(r"""grep "iteration.*lm_loss:" <log> | tail -1 | grep -oP 'iteration\s+\K\d+'""", log)[1] == f"{STEPS}\n"
    )
    assert bash(r"""grep "iteration.*lm_loss:" <log> | tail -1 | grep -oP 'iteration\s+\d+/\s*\K\d+'""", log)[1] == (
        f"{STEPS}\n"
    )
    loss = bash(r"""grep "iteration.*lm_loss:" <log> | tail -1 | grep -oP 'lm_loss: \K[0-9.E+-]+'""", log)[1]
    assert float(loss) == pytest.approx(healthy.losses()[STEPS], rel=1e-6)
    assert bash(EXPERIMENT, log) == (0, "sf_model_organisms/exp_1\n")
    assert time.time() - int(bash("stat -c %Y <log>", log)[1]) < 600
    text = log.read_text()
    for phase in (
        "saved checkpoint",
        "validation results",
        "test results",
        "going on from",
        "run stopped at",
        "run fin",
    ):
        assert phase in text, "the run went through everything that prints"


def test_the_log_of_a_crashed_run_ends_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    ended = run(tmp_path, script=str(tmp_path / "crashing.py"))
    assert ended.code == 1
    every_row(ended.log)
    last = "".join(ended.log.read_text().splitlines(keepends=True)[-100:])
    assert re.search(r"error: rank 1 of 2 failed with exit code 1;[\s\S]*Traceback[\s\S]*ValueError: rank one is", last)
    assert "ValueError: rank one is ill" in (ended.save / "logs" / "rank_1.log").read_text()


@pytest.mark.more
def test_a_full_disk_under_save_and_logs_is_told_in_one_line(tmp_path: Path) -> None:
    """By the save that finds it, not by the logs of the launcher and the ranks, which meet it before."""
    values = config(LLAMA, num_layers=1, train_iters=8, save="disk/run", checkpoint_factor=6, num_gpus=2)
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    (tmp_path / "filling.py").write_text(FILLING)
    (tmp_path / "disk").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    disk = [sys.executable, "-m", "tests.disks", str(tmp_path / "disk"), "2000", str(tmp_path / "kept")]
    command = [*disk, sys.executable, str(ROOT / "deepy.py"), "filling.py", "model.yml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in output, output
    assert re.search(r"^train.py: error: disk/run: a checkpoint takes about [\d.]+ kB, 0 bytes are free", output, re.M)
    assert re.search(r"iteration +6/", output), "six steps were made"
    assert "disk/run/logs: logs cannot be written (No space left on device); the run goes on" in output


@pytest.mark.more  # test_local.py has it without torch
@needs_proc
def test_a_stopped_rank_ends_the_run_within_a_minute_and_shows_all_stacks(tmp_path: Path) -> None:
    ended = run(tmp_path, hit=(signal.SIGSTOP, 1))
    assert ended.code == 128 + signal.SIGSTOP
    assert ended.seconds < 60
    assert not any(Path(f"/proc/{pid}").exists() for pid in ended.pids)
    every_row(ended.log)
    stacks = ended.log.read_text().partition("rank 0 of 2, where it is:")[2]
    assert "most recent call first" in stacks.partition("rank 1 of 2, where it is")[0], "rank 0's"
    assert "in train\n" in stacks.partition("rank 1 of 2, where it is")[2], "rank 1's"
    assert "in train\n" in (ended.save / "logs" / "rank_0.log").read_text()


@needs_proc
def test_a_killed_rank_ends_the_run_and_the_next_start_goes_on_by_itself(tmp_path: Path, healthy: Ended) -> None:
    ended = run(tmp_path, "--max-restarts", "2", hit=(signal.SIGKILL, 1))
    log = ended.log.read_text()
    assert ended.code == 0, log
    assert ended.seconds < 60
    assert log.count("deepy.py: restart 1 of 2 after rank 1 of 2 was killed by SIGKILL\n") == 1
    assert re.search(r"going on from \S+/global_step10, iteration 10", log)
    assert ended.losses() == healthy.losses()
    rows = [json.loads(line) for line in (ended.save / "logs" / "metrics.jsonl").read_text().splitlines()]
    restarts = {row["iteration"]: row["runtime/restarts"] for row in rows if "runtime/restarts" in row}
    assert restarts == {step: int(step > 10) for step in range(1, STEPS + 1)}
    where = (ended.save / "logs" / "rank_0.log").read_text().partition("iteration       11/")[2]
    assert "most recent call" in where.partition("going on from")[0], "where rank 0 was"
    assert "most recent call" not in log and "error:" not in log, "the run went on"
