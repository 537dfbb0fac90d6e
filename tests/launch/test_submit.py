"""A job submitted without --nodes submits itself again, once: with stand-ins for sbatch and scontrol."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.launch.submit import GO_ON, SUBMITTING_JOB, has_nodes_option, main, resubmit_command
from tests.launch.runs import ROOT, write_program
from tests.training.runs import ADAMW, LLAMA, config

# As `scontrol show job` printed it in a job of pretrain_neox.sbatch: Slurm 22.05 (options typed) and 24.11
# (none).
TYPED_LINES = """\
JobId=12 JobName=my run
   Priority=4294901752 Nice=0 Account=(null) QOS=normal
   Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=01:00:00 TimeMin=N/A
   Partition=debug AllocNode:Sid=localhost:2632
   ReqNodeList=(null) ExcNodeList=n2
   NumNodes=1 NumCPUs=40 NumTasks=1 CPUs/Task=32 ReqB:S:C:T=0:0:*:*
   TRES=cpu=40,node=1,billing=40
   MinCPUsNode=32 MinMemoryNode=500G MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=SCRIPT
   WorkDir=/home/me/neox
   Comment=a comment\x20
   StdOut=/x/12-of-12.out
   TresPerNode=gres:gpu:4
"""
BARE = """\
JobId=8 JobName=neox-training
   Priority=1 Nice=0 Account=(null) QOS=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=UNLIMITED TimeMin=N/A
   Partition=debug AllocNode:Sid=localhost:2632
   ReqNodeList=(null) ExcNodeList=(null)
   NumNodes=1 NumCPUs=40 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   ReqTRES=cpu=1,mem=600000M,node=1,billing=1
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=SCRIPT
   WorkDir=WORK
   TresPerNode=gres/gpu:4
"""


ONE_NODE = {"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "40"}  # and nothing typed
JOB = {"SLURM_JOB_ID": "8", "NEOX_SITE": "isambard", "PROJECTDIR": "/p", **ONE_NODE}


@pytest.mark.parametrize(("env", "expected"), [
    # What was typed: as a batch job saw it in Slurm 22.05 and 24.11.
    (ONE_NODE, False),  # nothing
    ({"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1"}, False),  # --cpus-per-task=32
    ({"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "40", "SLURM_NTASKS": "1"}, False),  # within another job
    ({"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}, True),  # --nodes=1
    ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2"}, True),  # -N2
    ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "40(x2)"}, True),  # --nodes=1-2
    ({"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2"}, True),  # --ntasks-per-node=2
])  # fmt: skip
def test_whether_nodes_were_typed(env, expected):
    assert has_nodes_option(env) == expected


def test_the_job_is_submitted_as_it_was_but_for_the_nodes(tmp_path):
    script = tmp_path / "pretrain_neox.sbatch"
    script.touch()
    job = TYPED_LINES.replace("SCRIPT", str(script))
    logs = {"output": "/x/12-of-12.out", "error": "/100%/8-112.err"}
    assert resubmit_command(job, 64, ["/c.yml", "--set", "lr=1 2"], logs) == [
        "sbatch", "--export=ALL", "--job-name=my run", "--nodes=64", "--cpus-per-task=32", "--comment=a comment",
        "--exclude=n2", "--mem=500G", "--partition=debug", "--qos=normal", "--time=01:00:00", "--gres=gpu:4",
        "--no-requeue", "--output=/x/%j-of-%j.out", "--error=/100%%/8-112.err",
        str(script), "/c.yml", "--set", "lr=1 2",
    ]  # fmt: skip
    bare = resubmit_command(BARE.replace("   TresPerNode=gres/gpu:4\n", ""), 2, [], {})
    assert bare == [
        "sbatch", "--export=ALL", "--job-name=neox-training", "--nodes=2", "--partition=debug", "--gres=none",
        str(ROOT / "pretrain_neox.sbatch"),
    ]  # fmt: skip


def write_config(folder: Path) -> Path:
    values = config(LLAMA, ADAMW, save=str(folder / "save"), train_iters=1, checkpoint_factor=1)
    (folder / "model.yml").write_text(yaml.safe_dump(values))
    return folder / "model.yml"


@pytest.fixture
def start(tmp_path):
    """Run the command as slurm/job.sh does; what sbatch and scontrol were given stands in `calls`."""
    (tmp_path / "work").mkdir()
    (tmp_path / "job").write_text(BARE.replace("SCRIPT", "/gone").replace("WORK", str(tmp_path / "work")))
    log = tmp_path / "8.out"
    record = (
        f"import json, os, sys; open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps([*sys.argv[1:], os.getcwd(), "
        "{n: v for n, v in os.environ.items() if n.startswith(('SLURM', 'NEOX'))}]) + '\\n')"
    )
    for name, answer in (
        ("sbatch", "echo Submitted batch job 13"), ("scontrol", f'[ "$1" = update ] || cat {tmp_path}/job'),
    ):  # fmt: skip
        notes = f'{sys.executable} -c {json.dumps(record)} {name} "$@"'
        write_program(tmp_path / "bin" / name, f"#!/bin/sh\n{notes}\n{answer}\n")
    path = write_config(tmp_path)

    def run(*words: str, **env: str) -> tuple[int, str, list[list]]:
        values = {**JOB, "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_CONF": "/c", **env}
        command = [sys.executable, "-m", "megatron.launch.submit", str(path), *words]
        with open(log, "w") as stream:
            done = subprocess.run(command, cwd=ROOT, env=values, stdout=stream, stderr=stream, timeout=60)
        calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
        return done.returncode, log.read_text(), [json.loads(line) for line in calls]

    return run


def test_without_nodes_it_is_submitted_again_with_the_site_s(start, tmp_path):
    code, log, calls = start("--set", "lr_decay_style=constant")
    assert code == 0, log
    assert [call[:2] for call in calls[:2]] == [["scontrol", "show"], ["scontrol", "update"]]
    assert calls[1][2:4] == ["JobId=8", "Requeue=0"]  # started anew, it would submit itself a second time
    (*words, folder, env) = calls[2]
    assert words == [
        "sbatch", "--export=ALL", "--job-name=neox-training", "--nodes=64", "--partition=debug", "--gres=gpu:4",
        f"--output={tmp_path}/%j.out", str(ROOT / "pretrain_neox.sbatch"), str(tmp_path / "model.yml"),
        "--set", "lr_decay_style=constant",
    ]  # fmt: skip
    assert folder == str(tmp_path / "work")
    assert {name: env[name] for name in env if name.startswith("SLURM")} == {"SLURM_CONF": "/c"}
    assert env[SUBMITTING_JOB] == "8"
    assert re.match("pretrain_neox.sbatch: .*64 nodes .*isambard\n", log)
    assert log.endswith("\nSubmitted batch job 13\n") and len(calls) == 3


@pytest.mark.parametrize("env", [
    {SUBMITTING_JOB: "7"},
    {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"},
    {"SLURM_JOB_NUM_NODES": "16", "SLURM_TASKS_PER_NODE": "1(x16)"},
    {"SLURM_ARRAY_JOB_ID": "8"},
    {"NEOX_NODES_PRETRAIN": "1"},
    {"NEOX_SITE": "local"},
], ids=["never twice", "--nodes=1", "--nodes=16", "an array", "it has as many", "a site of one node"])  # fmt: skip
def test_it_stays_as_it_is(tmp_path, monkeypatch, capsys, env):
    path = write_config(tmp_path)
    monkeypatch.chdir(ROOT)  # as slurm/job.sh
    assert main([str(path)], {**JOB, "PATH": "/usr/bin:/bin", **env}) == GO_ON
    assert capsys.readouterr().out == ""


def test_a_run_that_starts_from_a_model_has_fewer(start, tmp_path):
    _, log, calls = start("--set", f"load={tmp_path}", "finetune=true")
    assert "--nodes=16" in calls[-1] and "16 nodes" in log


def test_what_is_wrong_is_said_before_64_nodes_are_waited_for(start, tmp_path):
    code, log, calls = start("--set", "lr_decay_stile=constant")
    assert code == 1 and "pretrain_neox.sbatch: error: --set" in log and "lr_decay_style" in log and not calls
    code, log, calls = start("--set", "data_path=null")
    assert code == 1 and "error: data_path: " in log and not calls
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: too many nodes' >&2; exit 1\n")
    code, log, _ = start()
    assert code == 1 and "sbatch: error: too many nodes" in log
    assert "--nodes" in log.splitlines()[-1]


def test_the_batch_file_asks_for_no_nodes_and_no_tasks():
    """Else sbatch would count tasks always, and a typed --nodes=1 could not be told."""
    lines = [line for line in (ROOT / "slurm/pretrain_neox.sbatch").read_text().splitlines() if "#SBATCH" in line]
    assert "#SBATCH --sockets-per-node=1" in lines
    assert not [line for line in lines if "--nodes" in line or "ntasks" in line]
    assert os.path.samefile(ROOT / "pretrain_neox.sbatch", ROOT / "slurm/pretrain_neox.sbatch")
