"""tools/jobs.py on eight jobs of a real Slurm, one in each state that people ask about."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.test_faults import ANY_TROUBLE, CRASHED, EXPERIMENT, bash
from tests.slurm.conftest import OPTIONS, Submitter
from tests.training.runs import ADAMW, LLAMA, config

pytestmark = pytest.mark.slurm
Write = Callable[..., Path]
HELD = Path(__file__).with_name("held.py")
SITE = """\
export NEOX_NODES_PRETRAIN=2 NEOX_NODES=1 NEOX_LOG_DIR=FOLDER/logs
export NEOX_CHECKPOINT_DIR=FOLDER/sf_model_organisms
"""
WAIT_S = 150
# The loops as people have them; <log> stands for a file.
LAST = 'grep "iteration.*lm_loss:" <log> | tail -1'
ITERATION, TOTAL, LOSS = (
    rf"{LAST} | grep -oP '{pattern}'"
    for pattern in (r"iteration\s+\K\d+", r"iteration\s+\d+/\s*\K\d+", r"lm_loss: \K[\d.E+-]+")
)  # fmt: skip
STALE = "[ $(( $(date +%s) - $(stat -c %Y <log>) )) -gt 600 ]"
BAR = r'tail -50 <log> | grep -P "\d+%\|"'
HARNESS = 'grep -E "Running evaluation harness" <log>'


def jobs(slurm: Submitter, *words: str) -> "subprocess.CompletedProcess[str]":
    return slurm.python("tools/jobs.py", *words, site="eight")


def rows(slurm: Submitter, *words: str) -> dict[str, Any]:
    done = jobs(slurm, "list", "--json", *words)
    assert done.returncode in (0, 3), done.stderr
    return {row["id"]: row for row in json.loads(done.stdout)}


def make_site(slurm: Submitter, folder: Path) -> None:
    (slurm.clone / "slurm/sites/eight.sh").write_text(SITE.replace("FOLDER", str(folder)))


def end(slurm: Submitter, numbers: list[str]) -> None:
    for words in (*(["--signal=KILL", "--full", number] for number in numbers), numbers):
        subprocess.run(["scancel", *words], env=slurm.cluster.environment, capture_output=True)


class Eight:
    """Eight jobs, submitted as people do: their numbers, by what they are to be found doing."""

    def __init__(self, slurm: Submitter, folder: Path, write: Callable[..., Path]) -> None:
        self.slurm, self.folder, self._write = slurm, folder, write
        self.numbers: dict[str, str] = {}

    def submit(self, name: str, *words: str, hold: str | None = None, **keys: Any) -> None:
        save = str(self.folder / "sf_model_organisms" / f"exp_{name}" / "run")
        values = {"train_iters": 5000, "save": save, **keys}
        if hold is not None:
            values["callbacks"] = [f"{HELD}:{hold}"]
        path = self._write(f"{name}.yml", **values)
        words = (*OPTIONS, f"--job-name={name}", *words, "pretrain_neox.sbatch", str(path))
        self.numbers[name] = self.slurm.submit(*words, NEOX_SITE="eight")

    def wait(self, **verdicts: str) -> dict[str, Any]:
        """The rows by name, once the verdicts are these."""
        deadline = time.monotonic() + WAIT_S
        while True:
            rows_by_number = rows(self.slurm, *self.numbers.values())
            rows_by_name = {name: rows_by_number[number] for name, number in self.numbers.items()}
            if all(rows_by_name[name]["verdict"] == verdict for name, verdict in verdicts.items()):
                return rows_by_name
            assert time.monotonic() < deadline, json.dumps(rows_by_name, indent=1)
            time.sleep(1.0)


@pytest.fixture(scope="module")
def eight(accounted: Submitter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eight]:
    folder = tmp_path_factory.mktemp("eight")

    def write(name: str, **keys: Any) -> Path:
        path = folder / name
        path.write_text(yaml.safe_dump(config(LLAMA, ADAMW, checkpoint_factor=100000, **keys)))
        return path

    make_site(accounted, folder)
    jobs = Eight(accounted, folder, write)
    one_node = "--nodes=1"
    jobs.submit("pending", one_node, "--begin=now+1hour")
    jobs.submit("finished", one_node, train_iters=3)
    jobs.submit("failed", one_node, data_path=str(folder / "absent_text_document"))
    jobs.submit("training", one_node, hold="Slow")
    jobs.submit("evaluating", one_node, hold="Evaluating", eval_iters=1, eval_interval=3)
    jobs.submit("saving", one_node, hold="Saving", extra_save_iters=[3])
    jobs.submit("crashed", one_node, hold="Complaining")
    jobs.submit("stopped", one_node, hold="Slow")
    yield jobs
    end(accounted, list(jobs.numbers.values()))


def test_the_sites_nodes_and_folders_are_used(accounted: Submitter, write_config: Write, tmp_path: Path) -> None:
    """The first job of a site submits the one with the site's nodes, and says so."""
    make_site(accounted, tmp_path)
    path = write_config(train_iters=3, train_batch_size=12, save=str(tmp_path / "sf_model_organisms" / "two"))
    options = ("--oversubscribe", "--mem=100", "--gres=none")
    submitting_job = accounted.submit(*options, "pretrain_neox.sbatch", str(path), NEOX_SITE="eight")
    accounted.wait(submitting_job)
    row = rows(accounted, submitting_job)[submitting_job]
    number = re.fullmatch(r"submitted job (\d+) in its place", row["detail"] or "")
    assert row["verdict"] == "FINISHED" and number is not None, row
    accounted.wait(number[1])
    training_row = rows(accounted, number[1])[number[1]]
    assert (training_row["verdict"], training_row["nodes"]) == ("FINISHED", 2), training_row
    assert training_row["log"] == f"{tmp_path}/logs/neox-training-{number[1]}.out"
    assert (training_row["iteration"], training_row["total"], training_row["experiment"]) == (3, 3, "two")


def test_eight_jobs_get_the_right_verdict_and_the_shell_loops_agree(eight: Eight, accounted: Submitter) -> None:
    rows_by_name = eight.wait(pending="pending", training="training", evaluating="evaluating", saving="saving",
                       finished="FINISHED", failed="CRASHED", crashed="CRASHED", stopped="training")  # fmt: skip
    eight.wait(training="training", stopped="training")
    while (rows_by_name["stopped"]["iteration"] or 0) < 3 or (rows_by_name["training"]["iteration"] or 0) < 3:
        time.sleep(1.0)
        rows_by_name = eight.wait(training="training", stopped="training")
    status = json.loads(Path(rows_by_name["stopped"]["save"], "status.json").read_text())
    for pid in (status["launcher_pid"], status["pid"]):
        os.kill(pid, signal.SIGSTOP)
    try:
        log = rows_by_name["stopped"]["log"]
        os.utime(log, (time.time() - 700, time.time() - 700))
        done = jobs(accounted, "list", *eight.numbers.values())
        assert done.returncode == 3, done.stderr
        rows_by_name = eight.wait(stopped="STALE")
        assert 700 <= rows_by_name["stopped"]["silent_s"] and rows_by_name["stopped"]["state"] == "RUNNING"
        assert re.search(rf"^{eight.numbers['stopped']} .*STALE \d+ s", done.stdout, re.MULTILINE)
        assert bash(STALE, log)[0] == 0
    finally:
        for pid in (status["launcher_pid"], status["pid"]):
            os.kill(pid, signal.SIGKILL)

    for name in ("training", "evaluating", "saving", "crashed", "finished"):
        row, log = rows_by_name[name], rows_by_name[name]["log"]
        shell_values = (bash(ITERATION, log)[1], bash(TOTAL, log)[1], bash(LOSS, log)[1])
        row = rows(accounted, row["id"])[row["id"]] if name == "training" else row
        if name == "training":  # it goes on
            assert int(shell_values[0]) <= row["iteration"] <= int(shell_values[0]) + 5
        else:
            assert (row["iteration"], row["total"], row["loss"]) == (
                int(shell_values[0]),
                int(shell_values[1]),
                float(shell_values[2]),
            )
        assert bash(EXPERIMENT, log)[1] == f"sf_model_organisms/exp_{name}\n" and row["experiment"] == f"exp_{name}"
        assert (bash(CRASHED, log)[0] == 0) == (row["verdict"] == "CRASHED")
        assert (bash(ANY_TROUBLE, log)[0] == 0) == (row["verdict"] == "CRASHED"), bash(ANY_TROUBLE, log)
        assert bash(STALE, log)[0] == 1
        assert (bash(BAR, log)[0] == 0 and bash(HARNESS, log)[0] == 0) == (name == "evaluating")
        assert row["tokens_per_s"] > 0 and (row["eta_s"] is None) == (name in ("finished", "crashed"))
    listing = accounted.cluster.run("sacct", "-X", "-n", "-P", "--format=JobID,State")
    states = dict(line.split("|") for line in listing.splitlines())
    for name in ("training", "evaluating", "saving", "crashed", "finished", "failed"):
        assert states[rows_by_name[name]["id"]] == rows_by_name[name]["state"]
    assert rows_by_name["failed"]["state"] == "FAILED" and rows_by_name["crashed"]["state"] == "RUNNING"
    assert bash(CRASHED, rows_by_name["failed"]["log"])[0] == 0
    assert any("absent_text_document" in line for line in rows_by_name["failed"]["error_lines"])
    assert any("RuntimeError: a kernel hangs" in line for line in rows_by_name["crashed"]["error_lines"])
    assert len(rows_by_name["crashed"]["error_lines"]) <= 3 and rows_by_name["pending"]["iteration"] is None


def test_filters_logs_and_cancel(eight: Eight, accounted: Submitter) -> None:
    number = eight.numbers["training"]
    assert list(rows(accounted, "--name", "train*")) == [number]
    assert list(rows(accounted, "--experiment", "exp_saving")) == [eight.numbers["saving"]]
    assert jobs(accounted, "list", number).returncode == 0
    assert "lm_loss" in jobs(accounted, "logs", number, "-n", "3").stdout
    assert "lm_loss" in jobs(accounted, "logs", number, "-n", "3", "--rank", "0").stdout
    done = jobs(accounted, "logs", "999999")
    assert done.returncode == 1 and done.stderr == "jobs.py: error: job 999999: Slurm knows no such job\n"
    done = jobs(accounted, "cancel", eight.numbers["pending"], number)
    assert done.returncode == 0, done.stderr
    eight.wait(pending="CANCELLED", training="CANCELLED")


def test_without_accounting_the_verdicts_are_the_same(slurm: Submitter, write_config: Write, tmp_path: Path) -> None:
    make_site(slurm, tmp_path)
    path = write_config(train_iters=2, save=str(tmp_path / "sf_model_organisms" / "a"))
    words = ("--gres=none", "--nodes=1", "--output=other/%x_%j.log")
    (slurm.clone / "other").mkdir(exist_ok=True)
    good = slurm.submit(*words, "pretrain_neox.sbatch", str(path), NEOX_SITE="eight")
    waiting = slurm.submit("--begin=now+1hour", *words, "pretrain_neox.sbatch", str(path), NEOX_SITE="eight")
    bad = slurm.submit(*words, "pretrain_neox.sbatch", "/nowhere/a.yml", NEOX_SITE="eight")
    for job in (good, bad):
        slurm.wait(job)
    done = jobs(slurm, "list", "--json", good, waiting, bad)
    assert done.returncode == 3 and len(done.stderr.splitlines()) == 1
    assert re.match(r"jobs.py: sacct: .*disabled.*; using scontrol instead", done.stderr), done.stderr
    rows_by_id = {row["id"]: row for row in json.loads(done.stdout)}
    assert [rows_by_id[job]["verdict"] for job in (good, waiting, bad)] == ["FINISHED", "pending", "CRASHED"]
    assert (
        rows_by_id[good]["log"] == f"{slurm.clone}/other/neox-training_{good}.log"
        and rows_by_id[good]["iteration"] == 2
    )
    assert rows_by_id[waiting]["detail"] == "BeginTime" and any(
        "nowhere" in line for line in rows_by_id[bad]["error_lines"]
    )
    subprocess.run(["scancel", waiting], env=slurm.cluster.environment, check=True)
