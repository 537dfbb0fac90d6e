"""tools/jobs.py submit in a real Slurm: its success, and what it makes of failures that are real too."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.runs import taken_port
from tests.slurm.conftest import OPTIONS, Submitter
from tests.slurm.test_jobs import HELD, make_site

pytestmark = pytest.mark.slurm
HOLD_LOCK = """\
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


class Submitted:
    """A running `jobs.py submit`, whose streams are files."""

    def __init__(
        self, slurm: Submitter, folder: Path, words: list[str], options: tuple[str, ...], **extra_variables: str
    ) -> None:
        env = {**slurm.cluster.environment, **slurm.variables, "NEOX_SITE": "eight", "PYTHONPATH": str(slurm.clone)}
        command = [sys.executable, "tools/jobs.py", "submit", *words, "--interval", "0.5", "--", *OPTIONS, *options]
        self._out, self._err = folder / "submit.out", folder / "submit.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=slurm.clone, env={**env, **extra_variables}, stdout=out, stderr=err
            )

    @property
    def out(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def err(self) -> list[str]:
        return self._err.read_text().splitlines()

    def until(self, pattern: str) -> "re.Match[str]":
        """Returns a line of stderr, once it is there."""
        deadline = time.monotonic() + 120
        while (match := re.search(pattern, self._err.read_text(), re.MULTILINE)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, "\n".join(self.err)
            time.sleep(0.1)
        return match

    def end(self) -> int:
        return self.process.wait(240)


@pytest.fixture
def submit(accounted: Submitter, write_config: Callable[..., Path], tmp_path: Path):
    make_site(accounted, tmp_path)
    started: list[Submitted] = []

    def run(*options: str, watch: int = 5, variables: dict[str, str] | None = None, **keys: Any) -> Submitted:
        save = str(tmp_path / "sf_model_organisms" / "exp")
        path = write_config(**{"train_iters": 8, "save": save, **keys})
        original = path.read_bytes()
        words = [str(path), "--nodes", "1", "--watch", str(watch)]
        submitted = Submitted(accounted, tmp_path, words, options, **(variables or {}))
        submitted.config, submitted.config_before = path, original  # type: ignore[attr-defined]
        started.append(submitted)
        return submitted

    yield run
    for submitted in started:
        submitted.process.kill()
        assert submitted.config.read_bytes() == submitted.config_before, "a configuration was edited"  # type: ignore[attr-defined]
    subprocess.run(["scancel", "--user=root"], env=accounted.cluster.environment, capture_output=True)


def iterations(folder: Path) -> int:
    texts = [path.read_text() for path in (folder / "logs").glob("*.out")]
    return max([0, *(int(number) for text in texts for number in re.findall(r"iteration +(\d+)/", text))])


def test_success_is_said_after_the_fiftieth_iteration(submit, tmp_path):
    run = submit(watch=50, train_iters=200, callbacks=[f"{HELD}:Slow"], peak_theoretical_tflops=1e-3)
    while not run.out and run.process.poll() is None:
        time.sleep(0.05)
    assert iterations(tmp_path) >= 50, "the line came too early"
    assert run.end() == 0, run.err
    (line,) = run.out
    assert re.fullmatch(
        r"\d+: success: iteration 5\d/200: loss \d\.\d{4}, [\d,]+ tokens/s, \d+\.\d% of peak "
        rf"\(peak_theoretical_tflops\), \d+ (s|min) to go; log {tmp_path}/logs/neox-training-\d+\.out", line,
    ), line  # fmt: skip


def test_a_port_in_use_is_changed(submit):
    with taken_port("0.0.0.0") as port:
        run = submit(variables={"MASTER_PORT": str(port)})
        assert run.end() == 0, run.err
    assert any(re.search(r"\d+: port in use: .*port", line) for line in run.err), run.err
    assert any(re.search(r"submitted again with MASTER_PORT=30\d\d\d", line) for line in run.err)
    assert run.out and "success: iteration" in run.out[0]


def test_a_lock_that_outlives_its_job_is_waited_for(submit, accounted, tmp_path):
    save = tmp_path / "sf_model_organisms" / "exp"
    save.mkdir(parents=True)
    ended_job = accounted.submit("--gres=none", "--oversubscribe", "--mem=10", "--wrap", "true")
    accounted.wait(ended_job)
    (save / "status.json").write_text(json.dumps({"status": "running", "job": ended_job, "host": "elsewhere"}))
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(save / ".lock")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    run = submit()
    run.until(r"\d+: stale lock: .*another run is writing there")
    holder.kill()
    holder.wait()
    assert run.end() == 0, run.err
    assert any(re.search(r"\.lock was free again after \d+ s", line) for line in run.err), run.err


def test_a_node_that_fails_is_left_out(submit, accounted):
    run = submit("--no-requeue", watch=30, train_iters=100, callbacks=[f"{HELD}:Slow"])
    job = run.until(r"submitted job (\d+) for 1 node$")[1]
    accounted.wait(job, lambda: accounted.state(job) == "RUNNING")
    node = re.search(r" NodeList=(\S+)", accounted.record(job))[1]  # type: ignore[index]
    time.sleep(3)
    accounted.cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        assert run.until(rf"submitted again without node {node}") and run.end() == 0, run.err
    finally:
        resume = ["scontrol", "update", f"nodename={node}", "state=resume"]  # refused where it is back by itself
        subprocess.run(resume, env=accounted.cluster.environment, capture_output=True)
    assert any(re.search(rf"{job}: node failure: ", line) for line in run.err), run.err
    assert f"ExcNodeList={node}" in accounted.record(run.out[0].partition(":")[0])


def test_a_missing_folder_of_the_log_is_made(submit, tmp_path):
    run = submit(f"--output={tmp_path}/absent/deep/%x-%j.out")
    assert run.end() == 0, run.err
    assert f"jobs.py: created {tmp_path}/absent/deep" in run.err
    assert any("missing output folder" in line for line in run.err)


@pytest.mark.parametrize(("kind", "message", "keys"), [
    ("out of memory", "out of memory", {"callbacks": [f"{HELD}:Greedy"]}),
    ("data", "absent_text_document", {"data_path": "/nowhere/absent_text_document"}),
    ("hyper-parameters", "is not finite", {"optimizer": {"type": "Adam", "params": {"lr": 1e30}}}),
])  # fmt: skip
def test_what_a_person_must_mend_ends_with_a_report(submit, tmp_path, kind, message, keys):
    run = submit(**keys)
    assert run.end() == 4, run.err
    assert not run.out and sum("submitted job" in line for line in run.err) == 1, "it was not tried again"
    (report,) = (tmp_path / "logs").glob("*.report.txt")
    text = report.read_text()
    assert text.splitlines()[0] == f"run of {run.config}: {kind}" and message in text and len(text.splitlines()) < 60
    assert "nothing: submitting again cannot repair this failure" in text and "what to look at next" in text
    assert os.path.basename(report) in "\n".join(run.err) and text.strip().splitlines()[-1] in run.err
