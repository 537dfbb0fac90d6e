"""Two machines, here two launchers on loopback: one end for both, the losses of one machine."""

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron.launch.devices import free_port
from tests.launch.runs import DEEPY, ROOT, environment
from tests.pool import run_ranks
from tests.training.runs import LLAMA, config, curves

STEPS = 3
VALUES = config(
    LLAMA, train_iters=STEPS, train_batch_size=9, train_micro_batch_size_per_gpu=3, num_layers=2, log_interval=1
)  # fmt: skip
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
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(line, cwd=folder, env=env, text=True, **both))
    try:
        ends = []
        for process in reversed(started):
            out, _ = process.communicate(timeout=250)
            ends.append((process.returncode, out))
        return ends
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def on_one_machine() -> list[float]:
    return run_ranks(curves, 3, [VALUES], STEPS)[0][0].losses


@pytest.mark.parametrize(
    "words",
    [pytest.param((), id="deepy", marks=pytest.mark.more),
     pytest.param(("--launcher", "torchrun"), id="torchrun", marks=pytest.mark.product)],
)  # fmt: skip
def test_losses_are_those_of_one_machine(tmp_path, on_one_machine, words):
    (tmp_path / "a.yml").write_text(yaml.safe_dump({**VALUES, "log_dir": str(tmp_path / "logs")}))
    ends = run_two_launchers(tmp_path, ROOT / "train.py", *words)
    assert [code for code, _ in ends] == [0, 0], ends
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/lm_loss"] for row in rows if "train/lm_loss" in row] == on_one_machine


@pytest.mark.ends_processes
def test_a_rank_that_dies_is_named_on_both_machines_which_start_again_together(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "a.yml").write_text(yaml.safe_dump({**VALUES, "log_dir": "logs"}))
    (code, first), (other_code, second) = run_two_launchers(tmp_path, tmp_path / "script.py", "--max-restarts", "1")
    assert (code, other_code) == (0, 0), first + second
    log = tmp_path / "logs" / "rank_2.log"
    culprit = f"node 1 (host {socket.gethostname()}): rank 2 of 3"
    assert re.search(rf"deepy.py: {re.escape(culprit)}.*SIGKILL.*{log}", first)
    assert re.search(rf"deepy.py: rank 2 of 3 .*SIGKILL.*{log}", second)
    assert "error" not in first + second, "it goes on"
    for out in (first, second):
        assert f"deepy.py: restart 1 of 1 after {culprit}" in out
    assert "rank 0 of 3, local 0, start 1\n" in first and "rank 0 of 3" not in second
    assert log.read_text() == "".join(f"rank 2 of 3, local 1, start {start}\n" for start in (0, 1))
