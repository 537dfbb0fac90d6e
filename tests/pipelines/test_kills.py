"""A pipeline that is killed outright, again and again, comes to the same weights as one that is not."""

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.pipelines.small import command, environment, finals, pipeline, records, write_small


def kill(folder: Path, seconds: float, with_all: bool) -> str | None:
    """The stage in which a pipeline was killed, with_all: and what it started; None: it had ended."""
    process = subprocess.Popen(
        command("run", folder), env=environment(), start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, output
        return None
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        for pid in descendants(process.pid, folder) if with_all else []:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    state = records(folder) if (folder / "pipeline_state.json").is_file() else {}
    return next((name for name, record in state.items() if record["status"] == "running"), "between stages")


def descendants(pid: int, folder: Path) -> list[int]:
    """Processes that work in the pipeline's folder, but the pipeline itself."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != pid:
            try:
                if Path(os.readlink(entry / "cwd")) == folder.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def compare(tmp_path: Path, kills: int, seed: int, longest_s: float = 5.0) -> list[str]:
    """Kill pipelines so often and compare them with one that nobody killed; the stages of the kills."""
    whole = write_small(tmp_path / "whole")
    done = pipeline("run", whole)
    assert done.returncode == 0, done.stderr
    moment, killed_in = random.Random(seed), list[str]()
    for number in range(kills):
        folder = write_small(tmp_path / f"killed{number}")
        while True:
            last = len(killed_in) >= kills
            stage = kill(folder, 300 if last else moment.uniform(0.3, longest_s), with_all=bool(len(killed_in) % 2))
            if stage is None:
                break
            killed_in.append(stage)
        assert finals(folder) == finals(whole) and None not in finals(whole).values(), killed_in
        assert not list((folder / "checkpoints").glob("*.[0-9]*")), "something began anew"
        if len(killed_in) >= kills:
            break
    print(f"killed in {killed_in}")
    return killed_in


@pytest.mark.more
def test_killed_twice(tmp_path):
    compare(tmp_path, 2, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_at_twenty_random_moments(tmp_path):
    assert len(set(compare(tmp_path, 20, seed=1, longest_s=9.0))) >= 4
