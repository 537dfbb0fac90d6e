"""Signals before the first step and after the last: USR1 is remembered, so that the run starts, saves and
stops, and a scheduler can start it again; Ctrl-C ends it without a word of Python's."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.training.runs import LLAMA, config

ROOT = Path(__file__).resolve().parents[2]


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


def at_a_terminal() -> None:
    """What a shell starts in the background, as whole test runs are, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("script", ["deepy.py", "train.py", "eval.py", "generate.py", "tools/serve.py"])
@pytest.mark.parametrize(
    ("number", "at", "code"),
    [(signal.SIGUSR1, "import", 7), (signal.SIGINT, "import", 130), (signal.SIGINT, "exit", 130)],
)
def test_the_first_and_the_last_moments(
    script: str, number: signal.Signals, at: str, code: int, tmp_path: Path
) -> None:
    if at == "exit" and script != "deepy.py":
        pytest.skip("importing torch for it takes seconds")
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "SEND": str(int(number)), "AT": at}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], env=env, capture_output=True, text=True, timeout=60,
        preexec_fn=at_a_terminal,
    )  # fmt: skip
    name = Path(script).name
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(f"{name}: interrupted" if code == 130 else "") and "Traceback" not in done.stderr


@pytest.mark.parametrize("delay", [0.05, 1.5], ids=["Python starts", "torch is imported"])
def test_ctrl_c_while_a_run_starts(delay: float, tmp_path: Path) -> None:
    values = config(LLAMA, num_layers=1, train_iters=4, log_dir=str(tmp_path / "logs"))
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", "2", "train.py", str(tmp_path / "model.yml")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = subprocess.Popen(command, cwd=ROOT, env=env, text=True, preexec_fn=at_a_terminal, **streams)  # type: ignore[call-overload]
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while run.poll() is None and len(children.read_text().split()) < 2:
        time.sleep(0.01)
    time.sleep(delay)
    run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=60)[0]
    assert (run.returncode, "Traceback" in output) == (130, False), output
    assert output.endswith("deepy.py: ended by SIGINT\n")


@pytest.mark.parametrize("to", ["launcher", pytest.param("ranks", marks=pytest.mark.more)])
def test_usr1_while_a_run_starts(to: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    values = config(LLAMA, train_iters=100_000, save=str(save), checkpoint_factor=100_000)
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", "2", "train.py", str(tmp_path / "model.yml")]
    run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = save / "logs" / "rank_1.log"
    while run.poll() is None and not log.exists():
        time.sleep(0.01)
    pids = [run.pid]
    if to == "ranks":  # as srun does, which signals all processes of a step
        pids = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        time.sleep(0.7)  # Python itself is up
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    output = run.communicate(timeout=100)[0]
    assert run.returncode == 0, output
    status = json.loads((save / "status.json").read_text())
    assert status["status"] == "stopped" and 1 <= status["iteration"] <= 3
    assert (save / "latest").read_text().strip() == f"global_step{status['iteration']}"
