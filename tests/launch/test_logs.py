"""Logs never decide the fate of a run; deepy.py --max-restarts with scripts that fail on purpose."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.process import LogFile, logfile
from tests.disks import mount
from tests.launch.runs import DEEPY, MODEL, deepy, environment, logs_of, write_script
from tests.pool import run_ranks

FULL = """
from tests.disks import fill
print(f"rank {rank} start {start}")
if start == 0:
    if rank == 1:
        while len([log for log in Path("disk/logs").glob("rank_*") if log.stat().st_size]) < 2:
            time.sleep(0.01)
        fill(Path("disk"))
        Path("is_full").touch()
    wait_for("is_full")
    for line in range(500):
        print(f"rank {rank} line {line} ", "." * 100)
    if rank == 1:
        wait_for("rank_0_has_printed")
        raise ValueError("not yet")
    Path("rank_0_has_printed").touch()
    time.sleep(60)
if rank == 1:
    Path("disk/fill").unlink()
    Path("has_room").touch()
wait_for("has_room")
print(f"rank {rank} goes on")
"""


def test_a_full_disk_of_logs_ends_no_run_and_can_be_started_again_on(tmp_path: Path) -> None:
    done = deepy(tmp_path, FULL, "--max-restarts", "1", disk=200, keys={"log_dir": "disk/logs"})
    assert done.returncode == 0, done.stdout
    assert re.search(r"disk/logs: .*\(No space left on device\)", done.stdout)
    assert re.search(r"deepy.py: warning: disk/logs/rank_1.log: .* \d+ bytes", done.stdout)
    assert re.search(r"deepy.py: restart 1 of 1 after rank 1 of 2 .*exit code 1\n", done.stdout)
    assert "rank 0 line 499" in done.stdout and "rank 0 goes on\n" in done.stdout
    assert "ValueError: not yet" in done.stdout and "OSError" not in done.stdout
    for rank, log in enumerate(logs_of(tmp_path / "kept")):
        assert log.startswith(f"rank {rank} start 0\n") and log.endswith(f"rank {rank} goes on\n")


def test_what_is_kept_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest, and how much was lost."""
    monkeypatch.setattr(logfile, "MAX_BYTES", 10)
    warnings: list[str] = []
    (tmp_path / "logs").write_text("in the way")
    log = LogFile(tmp_path / "logs" / "a.log", warnings.append)
    for text in (b"one ", b"two ", b"three "):
        log.write(text)
    (tmp_path / "logs").unlink()
    (tmp_path / "logs").mkdir()
    for text in (b"four", b" five"):
        log.write(text)
    log.close()
    assert (tmp_path / "logs" / "a.log").read_bytes() == b"\n[8 bytes could not be written]\nthree four five"
    assert len(warnings) == 1 and re.match(rf"{tmp_path}/logs: .*\(Not a directory\)", warnings[0])


def test_output_to_a_full_disk(tmp_path: Path) -> None:
    """As `> job.log`: the exit code stays the run's."""
    with open("/dev/full", "w") as full:
        done = deepy(tmp_path, "print('x' * 100000, flush=True); sys.exit(3 * (rank == 0))", stdout=full, stderr=full)
    assert done.returncode == 3
    assert logs_of(tmp_path)[0] == "x" * 100000 + "\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    write_script(tmp_path, "print('heard', rank); print('also', file=sys.stderr)")
    line = f"{' '.join(DEEPY)} --num_gpus 2 script.py model.yml {closed}"
    streams = {"cwd": tmp_path, "env": environment(), "text": True, "timeout": 200}
    done = subprocess.run(["bash", "-c", line], capture_output=True, **streams)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == ("" if ">&-" in closed.split() else "heard 0\nalso\n")
    assert logs_of(tmp_path) == ["heard 0\nalso\n", "heard 1\nalso\n"]


def refused(rank: int, world_size: int, folder: str, model: str, read_only: str) -> tuple[int, str]:
    """For the pool: deepy.py's exit code and stderr, where `read_only` is a disk of that kind."""
    import deepy

    os.chdir(folder)
    if read_only:
        mount(Path(read_only), 100, True)
    sys.argv = ["deepy.py", "script.py", model]
    with redirect_stderr(StringIO()) as errors:
        return deepy.main(), errors.getvalue()


@pytest.mark.parametrize(("keys", "line"), [
    ({"checkpoint_factor": 1, "save": "/proc/x"}, r"model.yml:2: save: /proc/x: .*\(No such file or directory\)"),
    ({"log_dir": "taken"}, r"model.yml:1: log_dir: taken: .*a file"),
    ({"log_dir": "taken/x"}, r"model.yml:1: log_dir: taken/x: .*\(Not a directory\)"),
    ({"log_dir": "disk"}, r"model.yml:1: log_dir: disk: .*\(Read-only file system\)"),
    ({"checkpoint_factor": 1, "save": "disk"}, r"model.yml:2: save: disk: .*\(Read-only file system\)"),
    ({}, r"logs: .*a file.* log_dir"),
])  # fmt: skip
def test_a_folder_that_cannot_be_made_is_said_at_first(keys: dict[str, Any], line: str, tmp_path: Path) -> None:
    for name in ("taken", *(["logs"] if not keys else [])):
        (tmp_path / name).touch()
    (tmp_path / "disk").mkdir()
    write_script(tmp_path, "Path('started').touch()")
    values = {name: value for name, value in {**keys, **MODEL, **keys}.items() if name in keys or name != "log_dir"}
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values, sort_keys=False))
    disk = "disk" if "disk" in keys.values() else ""
    code, output = run_ranks(refused, 1, str(tmp_path), "model.yml", disk, init=False)[0]
    assert code == 1 and re.match(f"deepy.py: error: {line}", output) and output.count("\n") == 1, output
    assert not (tmp_path / "started").exists()


BEGIN = """\
from megatron.process import show_stacks_on_signal
from megatron.neox_arguments.reading.command_line import parse_script
show_stacks_on_signal()
args = parse_script(sys.argv[1:], "script.py")
print(f"rank {rank} start {start}")
"""


def run(folder: Path, text: str, *words: str, ranks: int = 2) -> tuple[int, str]:
    done = deepy(folder, BEGIN + textwrap.dedent(text), *words, ranks=ranks)
    return done.returncode, done.stdout


def test_a_failed_run_is_started_again_until_it_ends_well(tmp_path: Path) -> None:
    code, log = run(tmp_path, "if start < 2 and rank == 1: raise ValueError('not yet')", "--max-restarts", "3")
    assert code == 0
    assert "rank 0 start 2\n" in log and log.count("deepy.py: restart") == 2
    for k in (1, 2):
        assert re.search(rf"restart {k} of 3 after rank 1 of 2 .*exit code 1\n", log)
    assert [f"start {k}" in logs_of(tmp_path)[1] for k in range(3)] == [True] * 3, "logs of every start are kept"


@pytest.mark.parametrize(("ranks", "ending"), [(1, "raise ValueError('not yet')"), (2, "os.abort()")])
def test_the_log_of_a_run_that_goes_on_has_no_traceback(tmp_path: Path, ranks: int, ending: str) -> None:
    """People grep a job's log for these words to know that it crashed; why it did is in the rank's own."""
    text = f"""
    while not os.path.getsize("logs/rank_0.log"): time.sleep(0.01)  # else rank 0 may be ended before its line
    if start == 0 and rank == int(os.environ['WORLD_SIZE']) - 1: {ending}
    time.sleep(0 if start else 1)
    """
    code, log = run(tmp_path, text, "--max-restarts", "1", ranks=ranks)
    assert code == 0 and "rank 0 start 0\n" in log and "rank 0 start 1\n" in log
    assert not re.search("traceback|exception|error", log, re.IGNORECASE), log
    rank_log = tmp_path / "logs" / f"rank_{ranks - 1}.log"
    assert re.search(rf"deepy.py: rank {ranks - 1} of {ranks} .*{rank_log}\n", log)
    assert ("ValueError: not yet" if "raise" in ending else "Fatal Python error") in rank_log.read_text()


def test_restarts_are_limited(tmp_path: Path) -> None:
    code, log = run(tmp_path, "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)", "--max-restarts", "1")
    assert code == 128 + signal.SIGKILL
    assert re.search(r"restart 1 of 1 after rank 1 of 2 .*SIGKILL\n", log)
    assert log.count("deepy.py: restart") == 1 and log.count("deepy.py: error: ") == 1, "the last end is shown"
    assert logs_of(tmp_path)[1] == "rank 1 start 0\nrank 1 start 1\n"


@pytest.mark.parametrize("text", ["print('script.py: error: no such file', file=sys.stderr); sys.exit(1)",
                                  "sys.exit(0)"], ids=["bad", "good"])  # fmt: skip
def test_a_refusal_and_a_good_end_are_not_repeated(tmp_path: Path, text: str) -> None:
    code, log = run(tmp_path, text, "--max-restarts", "3")
    assert code == ("exit(1)" in text)
    assert "deepy.py: restart" not in log and "start 1" not in log
    assert "start 1" not in logs_of(tmp_path)[1]


@pytest.mark.ends_processes
def test_a_signal_from_outside_is_not_answered_with_a_restart(tmp_path: Path) -> None:
    text = "rank or time.sleep(0.5) or os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    code, log = run(tmp_path, text, "--max-restarts", "3")
    assert code == 128 + signal.SIGTERM
    assert log.count("rank 0 start") == 1


def test_what_said_how_to_start_is_dropped_once_the_run_has_saved(tmp_path: Path) -> None:
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
    code, log = run(tmp_path, text, "--max-restarts", "2", *words)
    assert code == 0, log
    lines = [line for line in log.splitlines() if line.startswith("restart ")]
    assert lines == ["restart True iteration 3"] * 2 + ["restart False iteration None"]
