"""The commands as users type them; ranks that should not start together, each reason in one line, on both."""

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron
import train as train_script
from megatron.distributed import startup_checks as handshake
from megatron.launch import process_info
from megatron.launch.devices import free_port
from megatron.neox_arguments import NeoXArgs
from megatron.training import start, train
from tests.pool import run_ranks
from tests.training.runs import LLAMA, NEOX, config, metric_rows

ROOT, HOST = Path(__file__).resolve().parents[2], socket.gethostname()


def command(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run python with nothing on the PATH, no g++; compiled extensions would land in `folder`."""
    env = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "CXX", "CC")}
    env |= {"PATH": str(folder / "empty"), "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two layers of YAML, in NeoX's two spellings."""
    values: dict[str, Any] = config(LLAMA, train_iters=4, save=str(tmp_path / "run"), checkpoint_factor=2)
    values |= {"load": values["save"], "eval_iters": 1, "eval_interval": 2, "split": "80,20,0", "num_workers": 1}
    local = {key: values.pop(key) for key in ("data_path", "split", "tokenizer_type", "vocab_file")}
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    (tmp_path / "local.yml").write_text(yaml.safe_dump({k.replace("_", "-"): v for k, v in local.items()}))
    return [str(tmp_path / "model.yml"), str(tmp_path / "local.yml")]


def printed(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    """For the pool: train.py's exit code, and what it prints."""
    with redirect_stdout(StringIO()) as output:
        code = train_script.main(argv)
    return code, output.getvalue()


def test_deepy_with_two_ranks(files: list[str], tmp_path: Path) -> None:
    done = command(tmp_path, "deepy.py", "train.py", *files, "--num_gpus", "2", "--set", "model_parallel_size=2")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "extensions").exists(), "nothing was compiled"
    log = done.stdout
    assert f"  save ............................ {tmp_path}/run" in log
    assert len(re.findall(r"iteration +\d+/ +4 \|.*lm_loss: \d\.\d{6}E[+-]\d\d \|", log)) == 4
    assert len(re.findall(r" validation results at iteration \d \| lm_loss value: ", log)) == 3
    assert log.rstrip().endswith("run finished at iteration 4")
    assert not re.search(r"error|exception|traceback|warning", log + done.stderr, re.IGNORECASE)
    assert (tmp_path / "run" / "latest").read_text() == "global_step4"
    assert sorted(p.name for p in (tmp_path / "run" / "logs").glob("rank_*")) == ["rank_0.log", "rank_1.log"]
    status = (tmp_path / "run" / "status.json").read_bytes()
    second_start = run_ranks(printed, 2, [*files, "--set", "model_parallel_size=2"], init=False)
    assert (tmp_path / "run" / "status.json").read_bytes() == status, "its end is when it ended"
    assert second_start[0][0] == 0 and "nothing left to do" in second_start[0][1]


@pytest.mark.more
def test_train_alone_and_under_torchrun(files: list[str], tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for name, launcher, keys in (("alone", [], ["train_micro_batch_size_per_gpu=4"]),
                                 ("torchrun", torchrun, ["pipe_parallel_size=2"])):  # fmt: skip
        places = [f"save={tmp_path / name}", f"load={tmp_path / name}"]
        done = command(tmp_path, *launcher, "train.py", *files, "--set", *keys, *places)
        assert done.returncode == 0, done.stderr
    for key, count in (("train/lm_loss", 4), ("validation/lm_loss", 3)):
        one_process, two_ranks = (
            [row[key] for row in metric_rows(tmp_path / name, key)] for name in ("alone", "torchrun")
        )
        assert len(one_process) == count and two_ranks == pytest.approx(one_process, rel=1e-5)


def program(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a run started by the script and by hand, with a configuration that is written to."""
    for way in ("script", "hand"):
        args = megatron.NeoXArgs.from_dict(values)
        args.user_script = "train.py"
        args.configure_distributed_args()
        assert (args.rank, args.world_size, args.train_batch_size) == (rank, world_size, 8)
        args.update_value("save", f"{values['save']}/{way}")
        if way == "script":
            assert train_script.main(args, overwrite_values={"train_iters": 3}) == 0
        else:
            args.train_iters = 3
            training = start(args, process_info())
            assert type(training.args) is NeoXArgs
            train(training)
            training.close()


def test_a_program_trains_with_what_it_wrote(tmp_path: Path) -> None:
    run_ranks(program, 1, config(NEOX, num_layers=2, train_iters=9, save=str(tmp_path), checkpoint_factor=100))
    script, hand = ([row["train/lm_loss"] for row in metric_rows(tmp_path / way)] for way in ("script", "hand"))
    assert len(script) == 3 and script == hand


# -- ranks that should not start together
def write(file: Path, **overrides: Any) -> str:
    logs = str(file.parent / "logs")
    values = config(LLAMA, num_layers=1, train_iters=1, save="run", checkpoint_factor=1, log_dir=logs, **overrides)
    file.write_text(yaml.safe_dump(values))
    return str(file)


def in_pool(rank: int, world_size: int, argv: list[list[str]], folders: list[str]) -> tuple[int, str]:
    """train.py as this rank of a machine of its own: exit code and stderr."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(folders[rank])
    handshake._PROBE_S = 0.5
    with redirect_stderr(StringIO()) as errors:
        code = train_script.main(argv[rank])
    return code, errors.getvalue()


def test_another_configuration_file(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yml")
    b = write(tmp_path / "b.yml", optimizer={"type": "Adam", "params": {"lr": 1e-4, "eps": 1e-6}})
    (code, text), other_rank = run_ranks(in_pool, 2, [[a], [b]], [str(tmp_path)] * 2, init=False)
    line = next(n for n, text in enumerate(Path(b).read_text().splitlines(), start=1) if "lr: 0.0001" in text)
    assert (code, text) == other_rank and code == 1
    assert re.search(rf"^train.py: error: rank 1 \(host {HOST}\).*rank 0 \(host {HOST}\)", text)
    assert re.search(rf"optimizer.params.lr .*0.0001 \({b}:{line}\).*0.001 \({a}:", text)


def test_a_save_that_is_not_shared_and_the_slow_transport_check(tmp_path: Path) -> None:
    """The same relative `save` from two folders; from one the next check refuses, with a low bound not."""
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        Path(folder).mkdir()
    argv = [write(tmp_path / "a.yml"), "--set", "min_allreduce_gb_s=1000"]
    for rank_folders, facts in ((folders, rf"save: run .*{folders[1]}/run .*rank 1 \(host {HOST}\)"),
                         (folders[:1] * 2, "min_allreduce_gb_s: .*1000 GB/s")):  # fmt: skip
        (code, text), other_rank = run_ranks(in_pool, 2, [argv, argv], rank_folders, init=False)
        assert (code, text) == other_rank and code == 1 and re.search(f"^train.py: error: .*{facts}", text), text
    argv[-1] = "min_allreduce_gb_s=0.000001"
    assert [code for code, _ in run_ranks(in_pool, 2, [argv, argv], folders[:1] * 2, init=False)] == [0, 0]
    assert (tmp_path / "a" / "run" / "latest").read_text() == "global_step1"


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    argv = [write(tmp_path / "a.yml"), "--set", "rendezvous_timeout_s=1"]
    ((code, text),) = run_ranks(in_pool, 1, [argv], [str(tmp_path)], init=False, env={"WORLD_SIZE": "2"})
    assert code == 1
    assert re.search(rf"^train.py: error: rank 1 of 2 .*127\.0\.0\.1:.*rank 0 \(host {HOST}\).* 1 s", text), text


@pytest.mark.product
def test_torchrun_with_another_version_of_the_code_on_the_second_machine(tmp_path: Path) -> None:
    """Two of torchrun's agents; the second's line also asks for more layers."""
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    with (tmp_path / "megatron" / "mpu" / "groups.py").open("a") as file:
        file.write("# newer\n")
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static"]
    line += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path != str(ROOT))
    argv = [write(tmp_path / "a.yml")]
    nodes = [
        subprocess.Popen(
            [*line, f"--node-rank={rank}", str(folder / "train.py"), *argv, *options],
            env=env, cwd=tmp_path, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank, (folder, options) in enumerate([(ROOT, []), (tmp_path, ["--set", "num_layers=2"])])
    ]  # fmt: skip
    for text in [node.communicate(timeout=280)[1] for node in nodes]:
        assert re.search(rf"rank 1 \(host {HOST}\).*rank 0 \(host {HOST}\).*num_layers is 2 \(--set\)", text), text
        code = next(line for line in text.splitlines() if "differ in code" in line)
        assert f"{tmp_path}/megatron" in code and f"{ROOT}/megatron" in code
        assert "megatron/mpu/groups.py" in code and "train.py differs" not in code
    assert all(node.returncode for node in nodes)
