"""Rows of jobs from what Slurm has written, their logs and their folders; the table and the JSON of them."""

import io
import json
import os
import pwd
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.launch.environment import LaunchError
from megatron.operations.jobs.overview import Choice, Row, overview
from megatron.operations.jobs.scheduler import Slurm
from megatron.operations.jobs.table import console, duration, render
from tests.launch.runs import ROOT, write_program
from tests.operations.jobs.test_joblog import ARGUMENTS, LINE

# What Slurm wrote, but for folders and times: 1 has ended, 2 trains, of 5 only a part has come to the
# accounts; 3 is held and 4 an array that is not due, of which sacct does not speak.
SACCT = [
    "1|neox-training|me|COMPLETED|0:0|{then}|{then}|{then}|2|n[1-2]|{work}|"
    "sbatch -o a.out -o logs/%x-%j.out pretrain_neox.sbatch /c.yml",
    "2|my run|me|RUNNING|0:0|{then}|{then}|Unknown|1|n1|{work}|sbatch --job-name=my run pretrain_neox.sbatch /c.yml",
    "5|allocation|me|COMPLETED|0:0|{then}|{then}|{then}|1|n1||",
    "7|convert_exp|me|CANCELLED by 0|0:0|{then}|{then}|{then}|1|n1|{work}|sbatch --wrap true",
]
SQUEUE = ["2|None", "3|JobHeldUser", "4_[0-3]|BeginTime"]
NO_SLURM = Slurm({}, lambda text: None, {"PATH": ""})  # of a machine without Slurm
SCONTROL = """\
JobId={id} {array}JobName={name}
   UserId=me(0) GroupId=root(0) MCS_label=N/A
   JobState={state} Reason={reason} Dependency=(null)
   SubmitTime={then} EligibleTime=Unknown
   StartTime=Unknown EndTime=Unknown Deadline=N/A
   NodeList=
   NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command={work}/pretrain_neox.sbatch /c.yml
   WorkDir={work}
   StdOut={log}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """A Slurm whose commands write what has been recorded."""
    commands, names = tmp_path / "bin", {"work": tmp_path, "then": int(time.time()) - 3600}
    rows = "\n".join(line.format(**names) for line in SACCT).replace("|", "\x1f")
    (tmp_path / "sacct.txt").write_text(rows)
    (tmp_path / "squeue.txt").write_text("\n".join(SQUEUE).replace("|", "\x1f"))
    for number, array, name, state, reason in (
        ("2", "", "my run", "RUNNING", "None"), ("3", "", "neox-training", "PENDING", "JobHeldUser"),
        ("4", "ArrayJobId=4 ArrayTaskId=0-3 ", "neox-training-arr", "PENDING", "BeginTime"),
    ):  # fmt: skip
        log = tmp_path / "logs" / f"{name}-{number}.out"
        text = SCONTROL.format(id=number, array=array, name=name, state=state, reason=reason, log=log, **names)
        (tmp_path / f"{number}.txt").write_text(text)
    for name, file in (("sacct", "sacct.txt"), ("squeue", "squeue.txt"), ("scontrol", "$3.txt")):
        write_program(commands / name, f"#!/bin/sh\nexec cat {tmp_path}/{file}\n")
    return Slurm({}, lambda text: pytest.fail(text), {"PATH": f"{commands}:{os.environ['PATH']}"})


def write_run(folder: Path, log: Path, number: str | None, phase: str | None = "training", **status: object) -> None:
    """A run as it stands after iteration 7 of 200, with a score of iteration 5."""
    save = folder / "sf" / "exp,a=1" / "run"
    (save / "logs").mkdir(parents=True)
    log.parent.mkdir(exist_ok=True)
    arguments = ARGUMENTS.replace("/p/checkpoints/sf_model_organisms/exp,a=1/run", str(save))
    log.write_text(arguments + "".join(LINE.format(n) for n in range(1, 8)))
    status_values = {"status": "running", "phase": phase, "iteration": 0, "train_iters": 200, "job": number, **status}
    (save / "status.json").write_text(json.dumps(status_values))
    row = {"train/lm_loss": 6.5, "runtime/iteration_time": 0.5}
    rows = [{**row, "iteration": n, "runtime/tokens_per_sec": 1000.0 * n} for n in range(1, 8)]
    rows[4] |= {"eval_tasks/piqa_acc": 0.5, "eval_tasks/piqa_acc_stderr": 0.1}
    later_row = {"iteration": 9, "runtime/tokens_per_sec": 1.0}  # of a job that trains in the same folder
    (save / "logs" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, later_row]))


def rows_by_id(slurm: Slurm, folder: Path, **choice: object) -> dict[str, Row]:
    site = {"NEOX_CHECKPOINT_DIR": str(folder / "sf")}
    return {row.job.id: row for row in overview(Choice(**choice), slurm, site)}  # type: ignore[arg-type]


def test_jobs_as_slurm_and_their_folders_tell(slurm: Slurm, tmp_path: Path) -> None:
    write_run(tmp_path, tmp_path / "logs" / "my run-2.out", "2", phase="saving the best model")
    rows = rows_by_id(slurm, tmp_path)
    expected_kinds = {"1": "FINISHED", "2": "saving", "3": "pending", "4_[0-3]": "pending"}
    assert {number: row.verdict.kind for number, row in rows.items()} == expected_kinds
    assert [rows[number].verdict.detail for number in ("3", "4_[0-3]")] == ["JobHeldUser", "BeginTime"]
    assert rows["1"].job.log == tmp_path / "logs" / "neox-training-1.out", "the last -o counts"
    row = rows["2"]
    assert row.experiment == "exp,a=1" and row.progress.iteration == 7
    assert row.tokens_per_s == 7000.0 and row.scores == {"piqa_acc": 0.5, "piqa_acc_stderr": 0.1}
    assert row.eta_s == pytest.approx(193 * 0.0139)
    assert list(rows_by_id(slurm, tmp_path, include_non_training=True)) == ["1", "2", "3", "4_[0-3]", "7"]
    assert rows_by_id(slurm, tmp_path, include_non_training=True)["7"].verdict.kind == "CANCELLED"
    assert list(rows_by_id(slurm, tmp_path, experiment="exp,*")) == ["2"]
    assert list(rows_by_id(slurm, tmp_path, name="neox-*-arr")) == ["4_[0-3]"]
    assert list(rows_by_id(slurm, tmp_path, max_age_s=60.0)) == ["2", "3", "4_[0-3]"]


def test_what_is_asked_for_and_not_there(slurm: Slurm, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="job 99: Slurm knows no such job"):
        rows_by_id(slurm, tmp_path, ids=["99"])
    (tmp_path / "bin" / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    messages: list[str] = []
    no_accounting = Slurm({}, messages.append, {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    assert rows_by_id(no_accounting, tmp_path, ids=["3"])["3"].verdict.detail == "JobHeldUser"
    assert rows_by_id(no_accounting, tmp_path, ids=["4"])["4_[0-3]"].verdict.kind == "pending"
    advice = "using scontrol instead, which forgets jobs minutes after they end"
    assert messages == [f"sacct: Slurm accounting storage is disabled; {advice}"]


def test_another_jobs_status_is_not_taken_for_this_ones(slurm: Slurm, tmp_path: Path) -> None:
    write_run(tmp_path, tmp_path / "logs" / "my run-2.out", "8", phase="evaluating")
    assert rows_by_id(slurm, tmp_path)["2"].verdict.kind == "training"


def test_runs_that_no_scheduler_started(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    status_values = {
        "host": socket.gethostname(),
        "pid": dead.pid,
        "launcher_pid": dead.pid,
        "time": "2026-11-24T04:00:00+0000",
    }
    write_run(tmp_path, tmp_path / "log", None, **status_values)
    save = tmp_path / "sf" / "exp,a=1" / "run"
    (row,) = rows_by_id(NO_SLURM, tmp_path).values()
    assert (
        row.verdict.kind == "CRASHED"
        and "processes ended without writing a status" in row.verdict.detail
        and row.needs_a_person
    )
    assert row.progress.total == 200 and row.tokens_per_s == 7000.0 and row.job.local
    assert [row.job.id for row in rows_by_id(NO_SLURM, tmp_path, ids=[str(save)]).values()] == [str(save)]
    verdicts = []
    for status, reason in (("failed", "step 3: not finite"), ("stopped", "SIGTERM")):
        (save / "status.json").write_text(
            json.dumps({**status_values, "status": status, "reason": reason, "train_iters": 200})
        )
        verdicts += [row.verdict for row in rows_by_id(NO_SLURM, tmp_path).values()]
    failed, stopped = verdicts
    assert (failed.kind, failed.error_lines) == ("CRASHED", ("step 3: not finite",))
    assert (stopped.kind, stopped.detail) == ("STOPPED", "SIGTERM")


def test_local_runs_of_other_machines_and_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, tmp_path / "log", None, host="elsewhere", time="2026-11-24T04:00:00+0000")
    save = tmp_path / "sf" / "exp,a=1" / "run"
    assert len(rows_by_id(NO_SLURM, tmp_path)) == 1
    me = pwd.getpwuid(os.getuid()).pw_name
    assert not rows_by_id(NO_SLURM, tmp_path, user="nobody") and len(rows_by_id(NO_SLURM, tmp_path, user=me)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.stat(save).st_uid + 1)
        assert not rows_by_id(NO_SLURM, tmp_path), "somebody else's"
    for path in (save / "status.json", save / "logs" / "rank_0.log", save / "logs" / "metrics.jsonl"):
        if path.exists():
            os.utime(path, (0, 0))
    assert not rows_by_id(NO_SLURM, tmp_path), "dead, or it would have written"
    assert len(rows_by_id(NO_SLURM, tmp_path, max_age_s=2 * time.time())) == 1


def test_damaged_files_of_a_run(tmp_path: Path) -> None:
    status_values = {"host": socket.gethostname(), "time": "2026-11-24T04:00:00+0000"}
    write_run(tmp_path, tmp_path / "log", None, **status_values, launcher_pid="abc", log_dir=7, pid=[1])
    save = tmp_path / "sf" / "exp,a=1" / "run"
    (save / "logs" / "metrics.jsonl").write_text('{"iteration": 3, "train/lm_loss": [1, 2]}\n')
    (row,) = rows_by_id(NO_SLURM, tmp_path).values()
    assert row.progress is None and row.verdict.kind == "CRASHED"


def test_a_client_of_slurm_without_a_cluster(tmp_path: Path) -> None:
    for name in ("scontrol", "squeue", "sacct"):
        write_program(tmp_path / "bin" / name, "#!/bin/sh\necho 'error: resolve_ctls_from_dns_srv' >&2\nexit 1\n")
    messages: list[str] = []
    slurm = Slurm({}, messages.append, {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    with pytest.raises(LaunchError, match="resolve_ctls"):
        rows_by_id(slurm, tmp_path)
    write_run(tmp_path, tmp_path / "log", None, host=socket.gethostname())
    assert len(rows_by_id(slurm, tmp_path)) == 1 == len(rows_by_id(slurm, tmp_path))
    assert len([line for line in messages if "showing only local runs" in line]) == 1, messages


def test_the_table_and_the_json(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "my run-2.out"
    write_run(tmp_path, log, "2")
    with log.open("a") as file:
        file.write("Traceback (most recent call last):\n  File x\nValueError: [bold]a\n")
    rows = list(rows_by_id(slurm, tmp_path).values())
    out = io.StringIO()
    console(out).print(render(rows, narrow=False, note="scontrol: Unable to contact slurm controller"))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[2].startswith("2        my run") and "stderr" not in lines[2]
    assert all(text in lines[2] for text in ("7/200 (4%)", "7,000", "piqa_acc 0.5"))
    assert f"2: CRASHED and still running; log {log}" in lines and "    ValueError: [bold]a" in lines
    assert "3: pending: JobHeldUser" in lines and lines[-1] == "scontrol: Unable to contact slurm controller"
    (row,) = [json.loads(json.dumps(other_row.as_dict())) for other_row in rows if other_row.job.id == "2"]
    assert (row["verdict"], row["iteration"], row["total"], row["eta_s"]) == ("CRASHED", 7, 200, None)
    assert row["error_lines"] == ["Traceback (most recent call last):", "ValueError: [bold]a"]
    explained = (ROOT / "docs" / "jobs.md").read_text().partition("## --json")[2].partition("## submit")[0]
    assert set(re.findall(r"`(\w+)`", explained)) >= set(row)
    expected_texts = ["40 s", "119 s", "12 min", "3 h 10 min", "2 d 4 h"]
    assert [duration(s) for s in (40, 119, 720, 3600 * 3 + 600, 86400 * 2 + 3600 * 4)] == expected_texts
