"""`train.py` on two ranks that should not start together: each reason in one line, on both, with exit code
1."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from megatron.distributed import startup_checks as handshake
from megatron.launch.devices import free_port
from tests.pool import run_ranks
from tests.training.runs import LLAMA, config

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def write(file: Path, **more: Any) -> str:
    """A configuration; its path."""
    values = config(
        LLAMA, num_layers=1, train_iters=1, save="run", checkpoint_factor=1, log_dir=str(file.parent / "logs")
    )
    file.write_text(yaml.safe_dump({**values, **more}))
    return str(file)


def in_pool(rank: int, world_size: int, argv: list[list[str]], folders: list[str]) -> tuple[int, str]:
    """train.py as this rank of a machine of its own: exit code and stderr."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(folders[rank])
    handshake._PROBE_S = 0.5
    with redirect_stderr(StringIO()) as errors:
        code = train.main(argv[rank])
    return code, errors.getvalue()


def begin(argv: list[str], env: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """python, with stderr to read."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *argv], env=env, cwd=folder, text=True, **streams)  # type: ignore[call-overload]


def test_another_configuration_file(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yml")
    b = write(tmp_path / "b.yml", optimizer={"type": "Adam", "params": {"lr": 1e-4, "eps": 1e-6}})
    outcomes = run_ranks(in_pool, 2, [[a], [b]], [str(tmp_path)] * 2, init=False)
    line = next(n for n, text in enumerate(Path(b).read_text().splitlines(), start=1) if "lr: 0.0001" in text)
    assert outcomes[0] == outcomes[1] and outcomes[0][0] == 1
    assert outcomes[0][1].startswith(f"train.py: error: rank 1 (host {HOST}) and rank 0 (host {HOST}) differ in config")
    assert f"optimizer.params.lr is 0.0001 ({b}:{line}) against 0.001 ({a}:" in outcomes[0][1]


def test_a_save_that_is_not_shared_and_the_slow_transport_check(tmp_path: Path) -> None:
    """The same relative `save` from two working folders; from one folder the run gets as far as the next
    check, which asks for more than there is, and with a low bound trains."""
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        Path(folder).mkdir()
    argv = [write(tmp_path / "a.yml"), "--set", "min_allreduce_gb_s=1000"]
    (code, text), other = run_ranks(in_pool, 2, [argv, argv], folders, init=False)
    assert (code, text) == other and code == 1
    assert text.startswith("train.py: error: save: run is not one folder for all machines: ")
    assert f"{folders[1]}/run of rank 1 (host {HOST})" in text
    (code, text), other = run_ranks(in_pool, 2, [argv, argv], folders[:1] * 2, init=False)
    assert (code, text) == other and code == 1
    assert text.startswith("train.py: error: --set: min_allreduce_gb_s: 1000 GB/s asked for; all-reduce of 8 MiB")
    argv[-1] = "min_allreduce_gb_s=0.001"
    assert [code for code, _ in run_ranks(in_pool, 2, [argv, argv], folders[:1] * 2, init=False)] == [0, 0]
    assert (tmp_path / "a" / "run" / "latest").read_text() == "global_step1"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX signals")
def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    argv = [write(tmp_path / "a.yml"), "--set", "rendezvous_timeout_s=1"]
    env = {**ENVIRONMENT, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [begin([str(ROOT / "train.py"), *argv], {**env, "RANK": str(rank)}, tmp_path) for rank in range(2)]
    time.sleep(0.3)  # it imports
    ranks[1].kill()
    last_line = ranks[0].communicate(timeout=60)[1].splitlines()[-1]
    ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert last_line.startswith("train.py: error: rank 1 of 2 did not come to 127.0.0.1:")
    assert f"(there: rank 0 (host {HOST})) within 1 s of the latest arrival" in last_line


def test_torchrun_with_another_version_of_the_code_on_the_second_machine(tmp_path: Path) -> None:
    """Two of torchrun's agents; the second's line also asks for more layers."""
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    with (tmp_path / "megatron" / "mpu" / "groups.py").open("a") as file:
        file.write("# newer\n")
    line = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static"]
    line += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    env = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path != str(ROOT))}
    argv, more = write(tmp_path / "a.yml"), ["--set", "num_layers=2"]
    nodes = [
        begin(["-m", *line, "--node-rank=0", str(ROOT / "train.py"), argv], env, tmp_path),
        begin(["-m", *line, "--node-rank=1", str(tmp_path / "train.py"), argv, *more], env, tmp_path),
    ]
    error_outputs = [node.communicate(timeout=90)[1] for node in nodes]
    assert all(node.returncode for node in nodes)
    for text in error_outputs:
        assert f"rank 1 (host {HOST}) and rank 0 (host {HOST}) differ in configuration: num_layers is 2 (--set)" in text
        code = next(line for line in text.splitlines() if "differ in code" in line)
        assert f"{tmp_path}/megatron is not {ROOT}/megatron: " in code
        assert "megatron/mpu/groups.py differs" in code and "train.py differs" not in code
