"""Signals before the first step and after the last, and the end of a process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.runs import ROOT, environment, wait_for
from tests.training.runs import LLAMA, config

SCRIPTS = ("deepy.py", "train.py", "eval.py", "generate.py", "tools/serve.py")
# What every Python imports at its start: it sends a signal when something slow is about to be imported, or at
# the end.
HOOK = """
import atexit, importlib.abc, os, sys, time
def send():
    os.kill(os.getpid(), int(os.environ["SEND"]))
    time.sleep(0.05)
class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "megatron.neox_arguments":
            sys.meta_path.remove(self)
            send()
            os._exit(7)
if os.environ["AT"] == "import":
    sys.meta_path.insert(0, Hook())
else:
    atexit.register(send)
"""


def handles(pid: int, number: int) -> bool:
    """Whether a process has got so far as to handle a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1


def start(folder: Path, **keys: Any) -> "subprocess.Popen[str]":
    """A run of two ranks, which have just been started when this returns."""
    (folder / "model.yml").write_text(yaml.safe_dump(config(LLAMA, log_dir=str(folder / "logs"), **keys)))
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", "2", "train.py", str(folder / "model.yml")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, preexec_fn=at_a_terminal, **streams)  # type: ignore[call-overload]
    wait_for(lambda: run.poll() is not None or len(children(run)) >= 2)
    return run


def children(run: "subprocess.Popen[str]") -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


def at_a_terminal() -> None:
    """Restores SIGINT: processes that a shell starts in the background, as full test runs are, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.ends_processes
@pytest.mark.parametrize(
    ("script", "number", "moment", "code"),
    [*((script, signal.SIGUSR1, "import", 7) for script in SCRIPTS),
     *((script, signal.SIGINT, "import", 130) for script in SCRIPTS), ("deepy.py", signal.SIGINT, "exit", 130)],
)  # fmt: skip
def test_first_and_last_moments(script: str, number: signal.Signals, moment: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}", SEND=str(int(number)), AT=moment)
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], env=env, capture_output=True, text=True, timeout=200,
        preexec_fn=at_a_terminal,
    )  # fmt: skip
    name = Path(script).name
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(f"{name}: interrupted" if code == 130 else "") and "Traceback" not in done.stderr


@pytest.mark.ends_processes
@pytest.mark.parametrize("delay", [0.05, 1.5], ids=["Python starts", "torch is imported"])
def test_ctrl_c_while_a_run_starts(delay: float, tmp_path: Path) -> None:
    run = start(tmp_path, num_layers=1, train_iters=4)
    time.sleep(delay)
    run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=200)[0]
    assert (run.returncode, "Traceback" in output) == (130, False), output
    assert output.splitlines()[-1].startswith("deepy.py: ") and "SIGINT" in output.splitlines()[-1]


@pytest.mark.ends_processes
@pytest.mark.parametrize("to", ["launcher", pytest.param("ranks", marks=pytest.mark.product)])
def test_usr1_while_a_run_starts(to: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    run = start(tmp_path, train_iters=100_000, save=str(save), checkpoint_factor=100_000)
    pids = [run.pid]
    if to == "ranks":  # as srun does, which signals all processes of a step
        pids = children(run)
        wait_for(lambda: all(handles(pid, signal.SIGUSR1) for pid in pids))
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    output = run.communicate(timeout=250)[0]
    assert run.returncode == 0, output
    status = json.loads((save / "status.json").read_text())
    assert status["status"] == "stopped" and 0 <= status["iteration"] <= 3
    assert status["reason"] == "signal SIGUSR1" and "SIGUSR1" in output
    saved = (save / "latest").read_text().strip() if (save / "latest").exists() else None
    assert saved in (f"global_step{status['iteration']}", None if status["iteration"] == 0 else ""), "had it a model?"


# Stands for the process group whose destruction aborts: an object that is alive until modules are destroyed.
ENDING = """
import atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from megatron.process import end_process
class Aborts:
    def __del__(self, abort=os.abort):
        abort()
sys.kept = Aborts()
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
pool = ThreadPoolExecutor(1)
pool.submit(print, "executor").result()
{end}(3)
"""


@pytest.mark.parametrize(("end", "code"), [("end_process", 3), ("sys.exit", -6)])
def test_everything_runs_but_the_clean_up_of_modules(end: str, code: int) -> None:
    """Under `sys.exit` the same process aborts: the script does what it says."""
    script = ENDING.format(end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert code < 0 or done.stdout.split() == ["executor", "thread", "registered"]
