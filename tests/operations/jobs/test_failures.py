"""Classes of failures by what programs really write, what is done about the safe ones, and the report."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.operations.jobs.failures import FOLDER, KINDS, NODE, UNKNOWN, bad_node, classify
from megatron.operations.jobs.overview import Row
from megatron.operations.jobs.remedies import Remedy, free_lock, remedy
from megatron.operations.jobs.scheduler import Job, Slurm, continued_log, parse_scontrol
from megatron.operations.jobs.submission import Request, _target, share_of_peak, write_report
from megatron.operations.jobs.verdict import CRASHED, Verdict
from megatron.training.checkpoint.pieces import lock_folder
from tests.training.runs import BASE

JOB = Job("4711", "neox-training", "me", "FAILED", exit_code="1:0", log=Path("/nowhere/a.out"))
ROW = Row(JOB, Verdict(CRASHED, "Slurm: FAILED"))


@pytest.mark.parametrize(("line", "kind"), [
    ("train.py: error: rank 0: out of memory in the backward pass: 2.00 GiB asked, 0.50 GiB free", "out of memory"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "out of memory"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks", "out of memory"),
    ("deepy.py: error: MASTER_PORT: port 29500 cannot be used (Address already in use)", "port in use"),
    ("train.py: error: port 29500 of host a is taken, so rank 0 cannot listen at a:29500", "port in use"),
    ("RuntimeError: The server socket has failed to listen on any network address. EADDRINUSE", "port in use"),
    ("train.py: error: /p/run: another run is writing there; wait for it to end", "stale lock"),
    ("deepy.py: error: Slurm gave this node 4 GPUs, but torch sees 3: run nvidia-smi there", "node failure"),
    ("NVRM: Xid (PCI:0000:04:00): 79, pid=1234, GPU has fallen off the bus.", "node failure"),
    ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T04:00:00 DUE TO NODE FAILURE ***", "node failure"),
    ("slurmstepd: error: Could not open stdout file /p/a/7.out: No such file", "missing output folder"),
    ("train.py: error: step 12: gradient of layers.3.mlp is not finite; weights are kept", "hyper-parameters"),
    ("train.py: error: step 9: 20 fp16 overflows in a row, the loss scale cannot recover", "hyper-parameters"),
    ("train.py: error: 90 training samples, but 100 are needed to reach train_iters 10 from iteration 0", "data"),
    ("train.py: error: /p/a.bin: 90 bytes, but /p/a.idx describes 100: the file is truncated", "data"),
    ("train.py: error: a.yml:7: lr_decay_stile: no such key; do you mean lr_decay_style?", "configuration"),
    ("OSError: [Errno 28] No space left on device", "disk"),
    ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T04:00:00 DUE TO TIME LIMIT ***", "time"),
    ("deepy.py: error: rank 3 of 8 made no progress in time (collective_timeout_s)", "stuck"),
    ("ZeroDivisionError: division by zero", "unknown"),
])  # fmt: skip
def test_classes(line: str, kind: str) -> None:
    failure = classify(JOB, ["starting from freshly initialised weights", line])
    assert (failure.kind.name, failure.lines[-1]) == (kind, line)


@pytest.mark.parametrize("wrong", [
    {"num_layers": 0}, {"lr_decay_stile": "linear"}, {"hidden_size": 30}, {"train_impl": "rm"},
    {"precision": "fp8"}, {"lora": {"r": 0}}, {"train_batch_size": 0},
])  # fmt: skip
def test_errors_about_keys_that_no_file_sets(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as problem:
        NeoXArgs.from_dict({**BASE, **wrong}, "--set")
    for line in str(problem.value).splitlines():
        assert classify(JOB, [f"train.py: error: {line.removeprefix('--set: ')}"]).kind.name == "configuration", line


def test_what_slurm_says_comes_first_and_the_list_of_arguments_is_no_evidence() -> None:
    lines = ["Address already in use"]
    assert classify(replace(JOB, state="NODE_FAIL"), lines).kind is NODE
    assert classify(replace(JOB, state="OUT_OF_MEMORY"), lines).kind.name == "out of memory"
    assert classify(replace(JOB, exit_code="0:53"), []).kind is FOLDER
    assert classify(JOB, []).kind is UNKNOWN
    safe = {kind.name for kind in KINDS if kind.safe}
    assert safe == {"port in use", "stale lock", "node failure", "missing output folder"}
    argument_line = "  valid_data_paths ................ ['/p/out of memory.bin'].....updated"
    assert classify(JOB, [argument_line, "ZeroDivisionError: division by zero"]).kind is UNKNOWN
    assert bad_node(replace(JOB, node_list="n[1-2]"), ["exclude the node (sbatch --exclude=n2); on"]) == "n2"
    assert bad_node(replace(JOB, node_list="n1"), []) == "n1"
    assert bad_node(replace(JOB, node_list="n[1-2]"), []) is None, "nobody knows which"


def args(save: Path, **keys: object) -> NeoXArgs:
    return NeoXArgs.from_dict({**BASE, "save": str(save), "checkpoint_factor": 10, **keys})


def test_another_port_and_a_folder(tmp_path: Path) -> None:
    no_slurm = Slurm({}, lambda text: None, {"PATH": ""})  # of a machine without Slurm

    def remedy_of(*lines: str, job: Job = JOB, **keys: object) -> Remedy:
        return remedy(classify(job, lines), replace(ROW, job=job), args(tmp_path, **keys), (), [], no_slurm)

    port = remedy_of("EADDRINUSE")
    assert port.environment == {"MASTER_PORT": "31211"} and not port.pairs and port.helps
    port = remedy_of("EADDRINUSE", master_port=29000)
    assert port.pairs == ("master_port=31211",) and "--set master_port=31211" in port.action
    job = replace(JOB, exit_code="0:53", log=tmp_path / "a" / "b" / "7.out")
    folder = remedy_of(job=job)
    assert (
        folder.helps
        and (tmp_path / "a" / "b").is_dir()
        and folder.action == f"created {tmp_path}/a/b, the folder of the log"
    )
    assert not remedy_of(job=job).helps
    (tmp_path / "file").touch()
    assert "cannot be created" in remedy_of(job=replace(job, log=tmp_path / "file" / "b" / "7.out")).action


class KnownJob(Slurm):
    """Knows one job, in this state; None: no job any more."""

    def __init__(self, state: str | None) -> None:
        self.state = state

    def job(self, number: str) -> Job | None:
        return replace(JOB, id=number, state=self.state) if self.state is not None else None


@contextmanager
def held(folder: Path, job: str) -> Iterator[int]:
    """The lock of a run's folder, held by a process of this number."""
    (wait, end), (ready, say) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["SLURM_JOB_ID"] = job
        lock = lock_folder(folder)
        os.write(say, b"1" if lock else b"0")
        os.read(wait, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"1"
        yield pid
    finally:
        os.write(end, b"1")
        os.waitpid(pid, 0)


def test_a_lock_is_removed_only_where_it_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that a file system keeps for a machine that went away has a holder that is no process here."""
    assert free_lock(tmp_path, None, 0).helps, "there is none"
    lock = tmp_path / ".lock"
    with held(tmp_path, "12") as holder:
        assert json.loads(lock.read_text()) == {"host": socket.gethostname(), "pid": holder, "job": "12"}
        # status.json is an earlier run's, which has ended: the lock is older than this one's first step.
        (tmp_path / "status.json").write_text(json.dumps({"status": "finished", "job": "7"}))
        result = free_lock(tmp_path, KnownJob("COMPLETED"), 0)
        assert not result.helps and f"process {holder} " in result.action
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        for slurm, fact in (
            (None, os.uname().nodename), (KnownJob(None), "not know job 12"), (KnownJob("RUNNING"), "job 12 (RUNNING)"),
        ):  # fmt: skip
            result = free_lock(tmp_path, slurm, 0, alive=lambda pid: False)
            assert not result.helps and fact in result.action and lock.exists()
        text = lock.read_text()
        lock.write_text("")
        result = free_lock(tmp_path, KnownJob("COMPLETED"), 0, alive=lambda pid: False)
        assert not result.helps and "another machine" in result.action and lock.exists()
        lock.write_text(text)
        result = free_lock(tmp_path, KnownJob("NODE_FAIL"), 0, alive=lambda pid: False)
        assert result.helps and "(NODE_FAIL)" in result.action and not lock.exists()


def test_a_lock_of_a_process_of_this_machine_that_is_gone(tmp_path: Path) -> None:
    with held(tmp_path, "12"):
        result = free_lock(tmp_path, None, 0, alive=lambda pid: False)
        assert result.helps and "is gone" in result.action and not (tmp_path / ".lock").exists()


def test_share_of_peak() -> None:
    assert share_of_peak(replace(ROW, utilization=0.412)) == "41.2% of peak (peak_theoretical_tflops)"
    half = replace(ROW, model_flops=494.7e12)
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"):
        assert share_of_peak(replace(half, device=device)) == f"50.0% of peak (989.4 dense bf16 TFLOP/s of {device})"
    assert share_of_peak(replace(ROW, model_flops=156e12, device="NVIDIA A100-SXM4-80GB")).startswith("50.0% of peak")
    for device in (None, "cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A10"):
        assert share_of_peak(replace(half, device=device)) == "share of peak unknown: set peak_theoretical_tflops"


def test_a_report_is_one_page(tmp_path: Path) -> None:
    job = replace(JOB, log=tmp_path / "a.out")
    lines = [f"line {n} {'x' * 400}" for n in range(400)]
    request, failure = Request(("/p/model.yml",)), classify(job, lines)
    path, text = write_report(request, replace(ROW, job=job), failure, ["1: port in use: b"], "sbatch c", lines)
    assert path == tmp_path / "a.report.txt" and path.read_text() == text
    assert text.startswith("run of /p/model.yml: unknown\n") and "1: port in use: b" in text and "sbatch c" in text
    assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 210


def test_how_long_it_waits_and_where_logs_go_on(tmp_path: Path) -> None:
    assert _target(0, 1000, 50, 12) == 50 and _target(0, 20, 50, 12) == 20
    assert _target(700, 1000, 50, 701) == 750, "a run that goes on"
    assert _target(700, 1000, 50, 3) == 50, "one that did not go on from there"
    text = (
        "JobId=12 JobName=my run\n   UserId=ann(1000) GroupId=x(1)\n   JobState=RUNNING Reason=None Dependency=(null)\n"
        "   SubmitTime=1795490014 EligibleTime=1795490014\n   StartTime=1795490017 EndTime=Unknown Deadline=N/A\n"
        "   NodeList=n[1-2]\n   NumNodes=2-2 NumCPUs=1\n   Command=/a b/pretrain_neox.sbatch /c.yml\n   WorkDir=/a b\n"
        f"   StdOut={tmp_path}/my run-12.out\n"
    )
    job = parse_scontrol(text)
    assert (job.id, job.name, job.user, job.state, job.nodes) == ("12", "my run", "ann", "RUNNING", 2)
    assert (job.start_time, job.end_time, job.node_list, job.work_dir) == (1795490017, None, "n[1-2]", Path("/a b"))
    assert job.trains and job.log == tmp_path / "my run-12.out"
    job.log.write_text(f"The log goes on in {tmp_path}/there.out\n")
    assert (
        continued_log(job.log) == tmp_path / "there.out" and continued_log(tmp_path / "absent") == tmp_path / "absent"
    )
