"""deepy.py --max-restarts with scripts that fail on purpose."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = """\
num_layers: 2
hidden-size: 8
num_attention_heads: 2
seq_length: 8
max_position_embeddings: 8
train_batch_size: 8
log_dir: logs
"""
SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
from megatron.process import show_stacks_on_signal
from megatron.neox_arguments.reading.command_line import parse_script
show_stacks_on_signal()
args = parse_script(sys.argv[1:], "script.py")
rank, start = int(os.environ["RANK"]), int(os.environ["NEOX_RESTARTS"])
print(f"rank {rank} start {start}")
"""


@pytest.fixture
def deepy(tmp_path):
    (tmp_path / "model.yml").write_text(MODEL)

    def run(text: str, *words: str, ranks: int = 2) -> tuple[int, str]:
        """Exit code and everything printed."""
        (tmp_path / "script.py").write_text(SCRIPT + textwrap.dedent(text))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(ROOT / "deepy.py"), "--num_gpus", str(ranks), "script.py", "model.yml", *words]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=tmp_path, env=env, text=True, timeout=60, **both)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_run_is_started_again_until_it_ends_well(deepy, tmp_path, ranks):
    text = "if start < 2 and rank == int(os.environ['WORLD_SIZE']) - 1: raise ValueError('not yet')"
    code, log = deepy(text, "--max-restarts", "3", ranks=ranks)
    assert code == 0
    assert "rank 0 start 2\n" in log and log.count("deepy.py: restart") == 2
    for k in (1, 2):
        assert f"deepy.py: restart {k} of 3 after rank {ranks - 1} of {ranks} failed with exit code 1\n" in log
    kept = (tmp_path / "logs" / f"rank_{ranks - 1}.log").read_text()
    assert [f"start {k}" in kept for k in range(3)] == [True] * 3, "logs of every start are kept"


@pytest.mark.parametrize(
    ("ranks", "how"), [(1, "raise ValueError('not yet')"), (2, "raise ValueError('not yet')"), (2, "os.abort()")]
)
def test_the_log_of_a_run_that_goes_on_has_no_traceback(deepy, tmp_path, ranks, how):
    """People grep a job's log for these words to know that it crashed; why it did is in the rank's own."""
    text = f"""
    while not os.path.getsize("logs/rank_0.log"): time.sleep(0.01)  # else rank 0 may be ended before its line
    if start == 0 and rank == int(os.environ['WORLD_SIZE']) - 1: {how}
    time.sleep(0 if start else 1)
    """
    code, log = deepy(text, "--max-restarts", "1", ranks=ranks)
    assert code == 0 and "rank 0 start 0\n" in log and "rank 0 start 1\n" in log
    assert not re.search("traceback|exception|error", log, re.IGNORECASE), log
    own = tmp_path / "logs" / f"rank_{ranks - 1}.log"
    assert re.search(rf"deepy.py: rank {ranks - 1} of {ranks} .*; its output is in {own}\n", log)
    assert ("ValueError: not yet" if "raise" in how else "Fatal Python error") in own.read_text()


def test_no_more_than_asked(deepy, tmp_path):
    code, log = deepy("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)", "--max-restarts", "1")
    assert code == 128 + signal.SIGKILL
    assert log.count("deepy.py: restart") == 1 and log.count("deepy.py: error: ") == 1, "the last end is shown"
    assert (tmp_path / "logs" / "rank_1.log").read_text() == "rank 1 start 0\nrank 1 start 1\n"


def test_one_rank_that_is_killed(deepy):
    code, log = deepy("if start == 0: os.kill(os.getpid(), 9)", "--max-restarts", "1", ranks=1)
    assert code == 0
    assert "deepy.py: restart 1 of 1 after rank 0 of 1 was killed by SIGKILL\n" in log


@pytest.mark.parametrize(
    "text",
    [
        "print('script.py: error: no such file', file=sys.stderr); sys.exit(1)",
        "sys.exit(0)",
    ],
    ids=["refusal", "success"],
)
def test_a_refusal_and_a_good_end_are_not_repeated(deepy, tmp_path, text):
    code, log = deepy(text, "--max-restarts", "3")
    assert code == ("exit(1)" in text)
    assert "deepy.py: restart" not in log and "start 1" not in log
    assert "start 1" not in (tmp_path / "logs" / "rank_1.log").read_text()


def test_a_signal_from_outside_is_not_answered_with_a_restart(deepy):
    code, log = deepy(
        """
        if rank == 0:
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        """,
        "--max-restarts",
        "3",
    )
    assert code == 128 + signal.SIGTERM
    assert log.count("rank 0 start") == 1


def test_what_said_how_to_start_is_dropped_once_the_run_has_saved(deepy, tmp_path):
    """`restart: true` and `iteration` would send every new start back."""
    text = """
    if rank == 0:
        print("restart", args.restart, "iteration", args.iteration)
        if start == 1:
            Path("run/latest").write_text("global_step7")
        if start < 2:
            raise ValueError("again")
    time.sleep(0 if start == 2 else 60)
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("global_step3")
    words = ("--set", "save=run", "load=run", "restart=true", "iteration=3", "checkpoint_factor=1")
    code, log = deepy(text, "--max-restarts", "2", *words)
    assert code == 0, log
    lines = [line for line in log.splitlines() if line.startswith("restart ")]
    assert lines == ["restart True iteration 3"] * 2 + ["restart False iteration None"]
