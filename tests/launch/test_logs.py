"""Logs never decide the fate of a run: their disk is full or read-only, or nobody reads what is printed."""

import os
import re
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.process import LogFile, logfile
from tests.disks import mount
from tests.launch.runs import DEEPY, MODEL, deepy, environment, write_script
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
    for rank in (0, 1):
        kept = (tmp_path / "kept" / "logs" / f"rank_{rank}.log").read_text()
        assert kept.startswith(f"rank {rank} start 0\n") and kept.endswith(f"rank {rank} goes on\n")


def test_what_is_kept_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest, and how much was lost."""
    monkeypatch.setattr(logfile, "KEPT", 10)
    warnings: list[str] = []
    (tmp_path / "logs").write_text("in the way")
    log = LogFile(tmp_path / "logs" / "a.log", warnings.append)
    for text in (b"one ", b"two ", b"three "):
        log.write(text)
    (tmp_path / "logs").unlink()
    (tmp_path / "logs").mkdir()
    log.write(b"four")
    log.write(b" five")
    log.close()
    assert (tmp_path / "logs" / "a.log").read_bytes() == b"\n[8 bytes could not be written]\nthree four five"
    assert len(warnings) == 1 and re.match(rf"{tmp_path}/logs: .*\(Not a directory\)", warnings[0])


def test_output_to_a_full_disk(tmp_path: Path) -> None:
    """As `> job.log`: the exit code stays the run's."""
    with open("/dev/full", "w") as full:
        done = deepy(tmp_path, "print('x' * 100000, flush=True); sys.exit(3 * (rank == 0))", stdout=full, stderr=full)
    assert done.returncode == 3
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "x" * 100000 + "\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    write_script(tmp_path, "print('heard', rank); print('also', file=sys.stderr)")
    line = f"{' '.join(DEEPY)} --num_gpus 2 script.py model.yml {closed}"
    streams = {"cwd": tmp_path, "env": environment(), "text": True, "timeout": 200}
    done = subprocess.run(["bash", "-c", line], capture_output=True, **streams)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == ("" if ">&-" in closed.split() else "heard 0\nalso\n")
    wanted = ["heard 0\nalso\n", "heard 1\nalso\n"]
    assert [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)] == wanted


def refused(rank: int, world_size: int, folder: str, model: str, read_only: str) -> tuple[int, str]:
    """For the pool: deepy.py's exit code and stderr, where `read_only` is a disk of that kind."""
    import deepy

    os.chdir(folder)
    if read_only:
        mount(Path(read_only), 100, True)
    sys.argv = ["deepy.py", "script.py", model]
    with redirect_stderr(StringIO()) as errors:
        return deepy.main(), errors.getvalue()


SAVING = {"checkpoint_factor": 1}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({**SAVING, "save": "/proc/x"}, r"model.yml:2: save: /proc/x: .*\(No such file or directory\)"),
        ({"log_dir": "taken"}, r"model.yml:1: log_dir: taken: .*a file"),
        ({"log_dir": "taken/x"}, r"model.yml:1: log_dir: taken/x: .*\(Not a directory\)"),
        ({"log_dir": "disk"}, r"model.yml:1: log_dir: disk: .*\(Read-only file system\)"),
        ({**SAVING, "save": "disk"}, r"model.yml:2: save: disk: .*\(Read-only file system\)"),
        ({}, r"logs: .*a file.* log_dir"),
    ],
)
def test_a_folder_that_cannot_be_made_is_said_before_anything_starts(
    keys: dict[str, Any], line: str, tmp_path: Path
) -> None:
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
