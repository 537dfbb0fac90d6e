"""Real runs of `deepy.py train.py` on two ranks, healthy and killed. Their log is an interface."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.launch.runs import DEEPY, PIPED_OUTPUT, ROOT, environment, wait_for
from tests.training.runs import LLAMA, config, metric_rows

STEPS = 16
VALUES = config(LLAMA, train_iters=STEPS, checkpoint_factor=5, model_parallel_size=2, eval_iters=2, eval_interval=10,
                split="80,10,10", num_workers=0)  # fmt: skip
# train.py, but at first rank 1 waits in step 13: the next checkpoint does not come before a signal does.
WAITING = """\
import os, sys, time
import train
from megatron.training.native.engine import NativeEngine
def waiting(self, *given, count=[0], step=NativeEngine.train_step):
    count[0] += 1
    if count[0] == 13 and os.environ["RANK"] == "1" and os.environ["NEOX_RESTARTS"] == "0":
        time.sleep(600)
    return step(self, *given)
NativeEngine.train_step = waiting
sys.exit(train.main())
"""


class ProcessEnd(NamedTuple):
    """log: file with all that was printed."""

    code: int
    log: Path
    save: Path

    def losses(self) -> dict[int, float]:
        losses = [(int(row["iteration"]), row["train/lm_loss"]) for row in metric_rows(self.save)]
        assert len(losses) == len(dict(losses)), "each step stands once"
        return dict(losses)


def run(folder: Path, *words: str, kill: bool = False) -> ProcessEnd:
    """A run of STEPS steps. kill: rank 1 after step 11, once the checkpoint of step 10 is there."""
    save = folder / "sf_model_organisms" / "exp_1" / "run"
    values = {**VALUES, "save": str(save), "load": str(save), "num_gpus": 2}
    (folder / "model.yml").write_text(yaml.safe_dump(values))
    (folder / "waiting.py").write_text(WAITING)
    script = str(folder / "waiting.py") if kill else "train.py"
    command = [*DEEPY, script, str(folder / "model.yml"), *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), **PIPED_OUTPUT)
    overdue = threading.Timer(250, process.kill)
    overdue.start()
    log = folder / "job.log"
    try:
        with log.open("a", buffering=1) as file:
            for line in process.stdout:
                file.write(line)
                if kill and re.search(r"iteration +11/", line):
                    wait_for(lambda: (save / "latest").exists() and (save / "latest").read_text() == "global_step10")
                    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
                    kill = False
        return ProcessEnd(process.wait(), log, save)
    finally:
        overdue.cancel()
        process.kill()
        process.wait()


def ranks_of(launcher: int) -> dict[int, int]:
    """Pids by rank, of a first start; a spare is started with -c."""
    pids = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    pids = [pid for pid in pids if b"\0-c\0" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    ranks = {pid: re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes()) for pid in pids}
    return {int(match[1]): pid for pid, match in ranks.items() if match}


def bash(command: str, log: Path | str) -> tuple[int, str]:
    """A line as people type it, with the name of the log in its place: exit code and output."""
    done = subprocess.run(["bash", "-c", command.replace("<log>", str(log))], capture_output=True, text=True)
    return done.returncode, done.stdout


CRASHED = 'tail -100 <log> | grep -qi "traceback\\|exception\\|error:"'
ANY_TROUBLE = 'grep -i "error\\|exception\\|traceback" <log>'
EXPERIMENT = "grep -oE 'sf_model_organisms/[^/\"]+' <log> | head -1"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> ProcessEnd:
    return run(tmp_path_factory.mktemp("healthy"))


def last_values(log: Path) -> tuple[float, ...]:
    """Iteration, number of iterations and loss of the last line that has them, as people ask for them."""
    patterns = (r"iteration\s+\K\d+", r"iteration\s+\d+/\s*\K\d+", r"lm_loss: \K[0-9.E+-]+")
    lines = 'grep "iteration.*lm_loss:" <log> | tail -1 | grep -oP'
    return tuple(float(bash(f"{lines} '{pattern}'", log)[1]) for pattern in patterns)


@pytest.mark.more
def test_the_log_of_a_healthy_run_answers_every_question(healthy: ProcessEnd) -> None:
    log = healthy.log
    assert healthy.code == 0, log.read_text()
    assert bash(ANY_TROUBLE, log) == (1, "")
    assert bash(CRASHED, log)[0] == 1
    assert len(re.findall(r"lm_loss: \d", bash('grep "iteration.*lm_loss" <log>', log)[1])) == STEPS
    assert last_values(log) == (STEPS, STEPS, pytest.approx(healthy.losses()[STEPS], rel=1e-6))
    assert bash(EXPERIMENT, log) == (0, "sf_model_organisms/exp_1\n")
    phases = ("saved checkpoint", "validation results", "test results", "run fin")
    assert all(phase in log.read_text() for phase in phases), "the run went through everything that prints"


@pytest.mark.more
@pytest.mark.ends_processes
def test_a_killed_rank_ends_the_run_and_the_next_start_goes_on_by_itself(healthy: ProcessEnd, tmp_path: Path) -> None:
    killed = run(tmp_path, "--max-restarts", "2", kill=True)
    log = killed.log.read_text()
    assert killed.code == 0, log
    assert len(re.findall("restart 1 of 2 after rank 1 of 2 .*SIGKILL\n", log)) == 1
    assert re.search(r"deepy.py: 1 restart; .* s of \d+ s", log), "how much of the time was spent in steps that count"
    assert re.search(r"going on from \S+/global_step10, iteration 10", log)
    assert killed.losses() == healthy.losses() and last_values(killed.log) == last_values(healthy.log)
    assert bash(EXPERIMENT, killed.log) == (0, "sf_model_organisms/exp_1\n") and bash(CRASHED, killed.log)[0] == 1
    restarts = {row["iteration"]: row["runtime/restarts"] for row in metric_rows(killed.save, "runtime/restarts")}
    assert restarts == {step: int(step > 10) for step in range(1, STEPS + 1)}
    log_end = (killed.save / "logs" / "rank_0.log").read_text().partition("iteration       11/")[2]
    assert "most recent call" in log_end.partition("going on from")[0], "where rank 0 was"
    assert "most recent call" not in log and "error:" not in log, "the run went on"
