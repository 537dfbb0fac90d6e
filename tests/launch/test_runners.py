"""Several machines, here on loopback: launchers started by hand, or by pdsh and OpenMPI over a stand-in."""

import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch.devices import free_port
from tests.launch.runs import DEEPY, PIPED_OUTPUT, ROOT, environment, write_program
from tests.pool import run_ranks
from tests.training.runs import LLAMA, config, curves, metric_rows

STEPS = 3
VALUES = config(LLAMA, train_iters=STEPS, train_batch_size=9, train_micro_batch_size_per_gpu=3, num_layers=2,
                log_interval=1)  # fmt: skip
SCRIPT = """\
import os, signal, sys, time
from megatron.neox_arguments.reading.command_line import parse_script
args = parse_script(sys.argv[1:], "script.py")
rank, start = os.environ["RANK"], os.environ["NEOX_RESTARTS"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, local {os.environ['LOCAL_RANK']}, start {start}")
if start == "0":
    if rank == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


def run_two_launchers(folder: Path, script: Path, *words: str) -> list[tuple[int, str]]:
    """Exit code and output of deepy.py on a machine with one rank, and on one with two."""
    env = environment(MAIN_NODE_IP="127.0.0.1", TOTAL_GPUS="3", GPUS="")
    common = ["--num_nodes", "2", "--master_port", str(free_port()), str(script), str(folder / "a.yml"), *words]
    started = []
    for rank in (1, 0):
        line = [*DEEPY, "--node_rank", str(rank), "--num_gpus", str(rank + 1), *common]
        started.append(subprocess.Popen(line, cwd=folder, env=env, **PIPED_OUTPUT))
    try:
        outputs = [process.communicate(timeout=250)[0] for process in reversed(started)]
        return [(process.returncode, out) for process, out in zip(reversed(started), outputs, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def on_one_machine() -> list[float]:
    return run_ranks(curves, 3, [VALUES], STEPS)[0][0].losses


@pytest.mark.parametrize("words", [
    pytest.param((), id="deepy", marks=pytest.mark.product),
    pytest.param(("--launcher", "torchrun"), id="torchrun", marks=pytest.mark.product),
])  # fmt: skip
def test_losses_are_those_of_one_machine(tmp_path, on_one_machine, words):
    (tmp_path / "a.yml").write_text(yaml.safe_dump({**VALUES, "log_dir": str(tmp_path / "logs")}))
    ends = run_two_launchers(tmp_path, ROOT / "train.py", *words)
    assert [code for code, _ in ends] == [0, 0], ends
    assert [row["train/lm_loss"] for row in metric_rows(tmp_path)] == on_one_machine


@pytest.mark.product
@pytest.mark.ends_processes
def test_a_dead_rank_is_named_on_both_machines_and_both_restart(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "a.yml").write_text(yaml.safe_dump({**VALUES, "log_dir": "logs"}))
    (code, first_output), (other_code, second_output) = run_two_launchers(
        tmp_path, tmp_path / "script.py", "--max-restarts", "1"
    )
    assert (code, other_code) == (0, 0), first_output + second_output
    log = tmp_path / "logs" / "rank_2.log"
    culprit = f"node 1 (host {socket.gethostname()}): rank 2 of 3"
    assert re.search(rf"deepy.py: {re.escape(culprit)}.*SIGKILL.*{log}", first_output)
    assert re.search(rf"deepy.py: rank 2 of 3 .*SIGKILL.*{log}", second_output)
    assert "error" not in first_output + second_output, "it goes on"
    for out in (first_output, second_output):
        assert f"deepy.py: restart 1 of 1 after {culprit}" in out
    assert "rank 0 of 3, local 0, start 1\n" in first_output and "rank 0 of 3" not in second_output
    assert log.read_text() == "".join(f"rank 2 of 3, local 1, start {start}\n" for start in (0, 1))


SSH = """\
#!{python}
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    option = words.pop(0)
    if option in ("-o", "-l", "-p"):
        words.pop(0)
os.execvp("sh", ["sh", "-c", " ".join(words[1:])])
"""


def start(folder: Path, *words: str, **changes: Any) -> subprocess.Popen:
    """deepy.py over two loopback addresses with one and two ranks."""
    write_program(folder / "bin" / "ssh", SSH.format(python=sys.executable))
    (folder / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=2\n")
    save = str(folder / "run")
    values = {**VALUES, "save": save, "load": save, "checkpoint_factor": 1000, **changes}
    (folder / "a.yml").write_text(yaml.safe_dump(values))
    env = environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    line = [*DEEPY, "-H", "hosts", "--master_port", str(free_port()), *words]
    return subprocess.Popen([*line, str(ROOT / "train.py"), "a.yml"], cwd=folder, env=env, **PIPED_OUTPUT)


@pytest.mark.slurm  # pdsh and OpenMPI come with `make test-slurm`
@pytest.mark.parametrize(("launcher", "program"), [("pdsh", "pdsh"), ("openmpi", "mpirun")])
def test_losses_over_runners_are_those_of_one_machine(tmp_path, launcher, program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    run = start(tmp_path, "--launcher", launcher)
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 0, out
    expected = run_ranks(curves, 3, [VALUES], STEPS)[0][0].losses
    assert [row["train/lm_loss"] for row in metric_rows(tmp_path / "run")] == expected


@pytest.mark.slurm
@pytest.mark.ends_processes
def test_a_signal_reaches_the_ranks_over_pdsh(tmp_path):
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed")
    run = start(tmp_path, train_iters=2000)
    lines = []
    for line in run.stdout:
        lines.append(line)
        if re.search(r"iteration +3/", line):
            run.send_signal(signal.SIGTERM)
            break
    remaining_output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, "".join(lines) + remaining_output
    assert len(metric_rows(tmp_path / "run")) < 2000 and (tmp_path / "run" / "latest").exists()
