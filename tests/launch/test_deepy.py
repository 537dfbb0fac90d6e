"""deepy.py as it is typed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = """\
num_layers: 2
hidden-size: 8
num_attention_heads: 2
seq_length: 8
max_position_embeddings: 8
train_batch_size: 8
"""
SCRIPT = """\
import os, sys
from megatron.launch import process_info
from megatron.neox_arguments.reading.command_line import parse_script
args = parse_script(sys.argv[1:], "script.py")
print(process_info().rank, args.hidden_size, args.num_layers, args.train_micro_batch_size_per_gpu)
"""


@pytest.fixture
def deepy(tmp_path):
    (tmp_path / "model.yml").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*words: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(ROOT / "deepy.py"), *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return run


def test_two_ranks_get_the_resolved_args(deepy, tmp_path):
    done = deepy("--num_gpus", "2", "script.py", "model.yml", "--set", "num_layers=4", f"log_dir={tmp_path}/out")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 8 4 4\n", "")
    assert (tmp_path / "out" / "rank_1.log").read_text() == "1 8 4 4\n"


def test_one_rank(deepy):
    done = deepy("script.py", "-d", ".", "model")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 8 2 8\n", "")


def test_print_config_starts_nothing(deepy, tmp_path):
    done = deepy("script.py", "model.yml", "--print-config")
    assert done.returncode == 0
    assert "# model.yml:2" in done.stdout
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing.py", "model.yml"), "deepy.py: error: nothing.py: no such script"),
        (("script.py", "model.yml", "--set", "hidden_sice=9"), "hidden_sice"),
        (("script.py", "model.yml", "--num_gpus", "3", "--set", "model_parallel_size=2"), "3 ranks cannot be divided"),
        (("script.py", "model.yml", "--include", "localhost:0"), "this machine shows none"),
    ],
)
def test_refused_in_one_line(deepy, words, message):
    done = deepy(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.startswith("deepy.py: error: ") and done.stderr.count("\n") == 1


def test_runs_that_share_a_log_dir_keep_their_own_arguments(tmp_path, monkeypatch):
    from megatron.launch.plan import plan
    from megatron.launch.run import write_args_file
    from megatron.neox_arguments import NeoXArgs
    from tests.training.runs import BASE

    files = []
    for pid, lr in ((1, 1e-3), (2, 5e-3)):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        values = {**BASE, "log_dir": str(tmp_path), "optimizer": {"type": "Adam", "params": {"lr": lr}}}
        run = plan("train.py", NeoXArgs.from_dict(values))
        write_args_file(run)
        files.append(run.command[-1])
    assert [NeoXArgs.from_json(open(file).read()).lr for file in files] == [1e-3, 5e-3]


@pytest.mark.parametrize(
    ("script", "key", "message"),
    [
        ("train.py", "coord_check=true", "coord_check: true is refused"),
        ("train.py", "seed=1", "data_path: is required"),
        ("eval.py", "coord_check=true", "coord_check: true is refused"),
        ("generate.py", "use_mup=true", "use_mup: true is refused"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(deepy, script, key, message):
    for more in (["--dry-run"], []):
        done = deepy(str(ROOT / script), "model.yml", "--set", key, *more)
        assert done.returncode == 1 and message in done.stderr and done.stdout == ""
