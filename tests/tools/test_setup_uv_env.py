"""setup_uv_env.sh; the whole of it with `make test-install`."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "setup_uv_env.sh"
NOT_COPIED = (".git", ".venv", ".cache", "__pycache__", "checkpoints", "logs", "data", ".mypy_cache", "*.egg-info")


def run(*words: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PY": sys.executable, **variables}
    return subprocess.run(
        ["bash", "setup_uv_env.sh", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )


def test_the_script_is_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPT)], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--gpu",), "--gpu is no option; known are --cpu"), (("--cpu", "--flash-attn"), "--flash-attn needs CUDA")],
)
def test_words_it_cannot_follow_are_refused(words, said):
    done = run(*words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"setup_uv_env.sh: error: {said}")


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Runs the script with a uv that writes its variables and words into a file and fails."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(f'#!/bin/sh\n{{ env; echo "WORDS=$*"; }} > {tmp_path}/asked; exit 1\n')
    (tmp_path / "bin/uv").chmod(0o755)
    shutil.copy(SCRIPT, tmp_path)
    shutil.copy(ROOT / "constraints.txt", tmp_path)

    def ask(*words: str, **variables: str) -> dict[str, str]:
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        run(*words, folder=tmp_path, PATH=path, **{"PIP_CONFIG_FILE": os.devnull, **variables})
        lines = (tmp_path / "asked").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    return ask


def test_what_pip_is_configured_with_reaches_uv(asked, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://index\nextra-index-url =\n  file:///a\n  file:///b\n"
    )
    found = asked("--cpu", PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PIP_FIND_LINKS="/wheels /more")
    assert found["UV_DEFAULT_INDEX"] == "https://index"
    assert found["UV_INDEX"] == "file:///a file:///b"
    assert found["UV_FIND_LINKS"] == "/wheels,/more"
    assert not found.get("UV_TORCH_BACKEND")


def test_torch_for_cpus_comes_from_its_own_index_where_no_other_is_named(asked):
    assert asked("--cpu")["UV_TORCH_BACKEND"] == "cpu"
    assert not asked().get("UV_TORCH_BACKEND")


@pytest.mark.install
@pytest.mark.timeout(1800)
def test_from_nothing_interrupted_again_and_without_a_network(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    shutil.copytree(ROOT / "tests/data", tree / "tests/data", dirs_exist_ok=True)
    shutil.copytree(ROOT / "megatron/data", tree / "megatron/data", dirs_exist_ok=True)
    env = {**os.environ, "PY": sys.executable, "UV_CACHE_DIR": str(tmp_path / "cache")}
    first = subprocess.Popen(["bash", "setup_uv_env.sh", "--cpu"], cwd=tree, env=env, start_new_session=True)
    while not list(tree.glob(".venv/lib/python*/site-packages/torch")):
        assert first.poll() is None
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = run("--cpu", folder=tree, UV_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LD_PRELOAD=$NCCL_LIBRARY uv run python" in done.stdout
    assert "2 passed" in done.stdout
    versions = "import sys, torch; print(torch.__version__, torch.version.cuda, sys.prefix)"
    told = subprocess.run(
        ["uv", "run", "python", "-c", versions], cwd=tree, capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": f"{tree}/.venv/bin:{os.environ['PATH']}"},
    ).stdout.split()  # fmt: skip
    assert told[0].startswith("2.13.0") and told[2] == str(tree / ".venv")
    assert not (tree / "uv.lock").exists()

    shutil.rmtree(tree / ".venv")
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}
    refused = run("--cpu", folder=tree, UV_CACHE_DIR=str(tmp_path / "none"), UV_HTTP_RETRIES="0", **nowhere)
    assert refused.returncode == 1
    assert "installing torch==2.13.0 failed" in refused.stderr and "No connection?" in refused.stderr
