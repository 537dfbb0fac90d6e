"""Logs never decide the fate of a run: their disk is full, cannot be written, or nobody reads what is
printed."""

import os
import re
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
from tests.pool import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8,
    "train_batch_size": 8, "log_dir": "logs",
}  # fmt: skip
SCRIPT = """\
import os, sys, time
from pathlib import Path
from tests.disks import fill
rank, start = int(os.environ["RANK"]), int(os.environ["NEOX_RESTARTS"])
"""
FULL = """
print(f"rank {rank} start {start}")
if start == 0:
    if rank == 1:
        while len([log for log in Path("disk/logs").glob("rank_*") if log.stat().st_size]) < 2:
            time.sleep(0.01)
        fill(Path("disk"))
        Path("is_full").touch()
    while not Path("is_full").exists():
        time.sleep(0.01)
    for line in range(500):
        print(f"rank {rank} line {line} ", "." * 100)
    if rank == 1:
        while not Path("rank_0_has_printed").exists():
            time.sleep(0.01)
        raise ValueError("not yet")
    Path("rank_0_has_printed").touch()
    time.sleep(60)
if rank == 1:
    Path("disk/fill").unlink()
    Path("has_room").touch()
while not Path("has_room").exists():
    time.sleep(0.01)
print(f"rank {rank} goes on")
"""


def deepy(
    folder: Path, script: str, *words: str, disk: int | None = None, ranks: int = 2, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A script of a few lines on ranks; with a disk of so many kilobytes (0: read-only) at `disk`, copied to
    `kept`."""
    (folder / "script.py").write_text(SCRIPT + textwrap.dedent(script))
    (folder / "model.yml").write_text(yaml.safe_dump({**MODEL, **more.pop("keys", {})}))
    command = [sys.executable, str(ROOT / "deepy.py"), "--num_gpus", str(ranks), "script.py", "model.yml", *words]
    if disk is not None:
        (folder / "disk").mkdir()
        command = [sys.executable, "-m", "tests.disks", str(folder / "disk"), str(disk), str(folder / "kept"), *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=folder, env=env, text=True, timeout=60, **{**streams, **more})


def test_a_full_disk_of_logs_ends_no_run_and_can_be_started_again_on(tmp_path: Path) -> None:
    done = deepy(tmp_path, FULL, "--max-restarts", "1", disk=200, keys={"log_dir": "disk/logs"})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("disk/logs: logs cannot be written (No space left on device); the run goes on") >= 1
    assert re.search(r"deepy.py: warning: disk/logs/rank_1.log: the last \d+ bytes could not be written\n", done.stdout)
    assert "deepy.py: restart 1 of 1 after rank 1 of 2 failed with exit code 1\n" in done.stdout
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
    assert (tmp_path / "logs" / "a.log").read_bytes() == b"\n[8 bytes could not be written]\n" + b"three four five"
    assert len(warnings) == 1 and warnings[0].startswith(f"{tmp_path}/logs: logs cannot be written (Not a directory)")


def test_output_to_a_full_disk(tmp_path: Path) -> None:
    """As `> job.log`: the exit code stays the run's."""
    with open("/dev/full", "w") as full:
        done = deepy(tmp_path, "print('x' * 100000, flush=True); sys.exit(3 * (rank == 0))", stdout=full, stderr=full)
    assert done.returncode == 3
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "x" * 100000 + "\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    script = "print('heard', rank); print('also', file=sys.stderr)"
    deepy_and = f"{sys.executable} {ROOT}/deepy.py --num_gpus 2 script.py model.yml {closed}"
    (tmp_path / "script.py").write_text(SCRIPT + script)
    (tmp_path / "model.yml").write_text(yaml.safe_dump(MODEL))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", deepy_and], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == ("" if ">&-" in closed.split() else "heard 0\nalso\n")
    assert [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)] == [
        "heard 0\nalso\n", "heard 1\nalso\n",
    ]  # fmt: skip


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
        ({**SAVING, "save": "/proc/x"}, "model.yml:2: save: /proc/x: cannot be written (No such file or directory)"),
        ({"log_dir": "taken"}, "model.yml:1: log_dir: taken: cannot be written (it is a file); set another"),
        ({"log_dir": "taken/x"}, "model.yml:1: log_dir: taken/x: cannot be written (Not a directory); set another"),
        ({"log_dir": "disk"}, "model.yml:1: log_dir: disk: cannot be written (Read-only file system); set another"),
        ({**SAVING, "save": "disk"}, "model.yml:2: save: disk: cannot be written (Read-only file system); set another"),
        ({}, "logs: cannot be written (it is a file); set log_dir to a folder where logs may be written"),
    ],
)
def test_a_folder_that_cannot_be_made_is_said_before_anything_starts(
    keys: dict[str, Any], line: str, tmp_path: Path
) -> None:
    for name in ("taken", *(["logs"] if not keys else [])):
        (tmp_path / name).touch()
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT + "Path('started').touch()")
    (tmp_path / "model.yml").write_text(yaml.safe_dump({**keys, **MODEL, **keys}, sort_keys=False))
    text = (tmp_path / "model.yml").read_text()
    if "log_dir" not in keys:
        (tmp_path / "model.yml").write_text(text.replace("log_dir: logs\n", ""))
    disk = "disk" if "disk" in keys.values() else ""
    code, output = run_ranks(refused, 1, str(tmp_path), "model.yml", disk, init=False)[0]
    assert code == 1 and output.startswith(f"deepy.py: error: {line}") and output.count("\n") == 1, output
    assert not (tmp_path / "started").exists()
