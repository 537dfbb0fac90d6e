"""deepy.py --max-restarts with scripts that fail on purpose."""

import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.runs import deepy

BEGIN = """\
from megatron.process import show_stacks_on_signal
from megatron.neox_arguments.reading.command_line import parse_script
show_stacks_on_signal()
args = parse_script(sys.argv[1:], "script.py")
print(f"rank {rank} start {start}")
"""
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def started(text: str, *words: str, ranks: int = 2) -> tuple[int, str]:
        """Exit code and everything printed."""
        done = deepy(tmp_path, BEGIN + textwrap.dedent(text), *words, ranks=ranks)
        return done.returncode, done.stdout

    return started


def test_a_failed_run_is_started_again_until_it_ends_well(run: Run, tmp_path: Path) -> None:
    code, log = run("if start < 2 and rank == 1: raise ValueError('not yet')", "--max-restarts", "3")
    assert code == 0
    assert "rank 0 start 2\n" in log and log.count("deepy.py: restart") == 2
    for k in (1, 2):
        assert re.search(rf"restart {k} of 3 after rank 1 of 2 .*exit code 1\n", log)
    kept = (tmp_path / "logs" / "rank_1.log").read_text()
    assert [f"start {k}" in kept for k in range(3)] == [True] * 3, "logs of every start are kept"


@pytest.mark.parametrize(("ranks", "how"), [(1, "raise ValueError('not yet')"), (2, "os.abort()")])
def test_the_log_of_a_run_that_goes_on_has_no_traceback(run: Run, tmp_path: Path, ranks: int, how: str) -> None:
    """People grep a job's log for these words to know that it crashed; why it did is in the rank's own."""
    text = f"""
    while not os.path.getsize("logs/rank_0.log"): time.sleep(0.01)  # else rank 0 may be ended before its line
    if start == 0 and rank == int(os.environ['WORLD_SIZE']) - 1: {how}
    time.sleep(0 if start else 1)
    """
    code, log = run(text, "--max-restarts", "1", ranks=ranks)
    assert code == 0 and "rank 0 start 0\n" in log and "rank 0 start 1\n" in log
    assert not re.search("traceback|exception|error", log, re.IGNORECASE), log
    own = tmp_path / "logs" / f"rank_{ranks - 1}.log"
    assert re.search(rf"deepy.py: rank {ranks - 1} of {ranks} .*{own}\n", log)
    assert ("ValueError: not yet" if "raise" in how else "Fatal Python error") in own.read_text()


def test_no_more_than_asked(run: Run, tmp_path: Path) -> None:
    code, log = run("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)", "--max-restarts", "1")
    assert code == 128 + signal.SIGKILL
    assert re.search(r"restart 1 of 1 after rank 1 of 2 .*SIGKILL\n", log)
    assert log.count("deepy.py: restart") == 1 and log.count("deepy.py: error: ") == 1, "the last end is shown"
    assert (tmp_path / "logs" / "rank_1.log").read_text() == "rank 1 start 0\nrank 1 start 1\n"


@pytest.mark.parametrize(
    "text",
    ["print('script.py: error: no such file', file=sys.stderr); sys.exit(1)", "sys.exit(0)"],
    ids=["bad", "good"],
)
def test_a_refusal_and_a_good_end_are_not_repeated(run: Run, tmp_path: Path, text: str) -> None:
    code, log = run(text, "--max-restarts", "3")
    assert code == ("exit(1)" in text)
    assert "deepy.py: restart" not in log and "start 1" not in log
    assert "start 1" not in (tmp_path / "logs" / "rank_1.log").read_text()


@pytest.mark.ends_processes
def test_a_signal_from_outside_is_not_answered_with_a_restart(run: Run) -> None:
    text = "rank or time.sleep(0.5) or os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    code, log = run(text, "--max-restarts", "3")
    assert code == 128 + signal.SIGTERM
    assert log.count("rank 0 start") == 1


def test_what_said_how_to_start_is_dropped_once_the_run_has_saved(run: Run, tmp_path: Path) -> None:
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
    code, log = run(text, "--max-restarts", "2", *words)
    assert code == 0, log
    lines = [line for line in log.splitlines() if line.startswith("restart ")]
    assert lines == ["restart True iteration 3"] * 2 + ["restart False iteration None"]
