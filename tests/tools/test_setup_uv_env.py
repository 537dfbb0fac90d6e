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
    [
        (("--gpu",), "--gpu is no option; known are --cpu, --cuda, --torch"),
        (("--cuda",), "--cuda needs a version, as --cuda 12.6"),
        (("--cpu", "--flash-attn"), "--flash-attn needs CUDA"),
    ],
)
def test_words_it_cannot_follow_are_refused(words, said):
    done = run(*words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"setup_uv_env.sh: error: {said}")


UV = f"""\
#!/bin/sh
{{ env | grep ^UV_ | sort; echo "$@"; }} >> uv.log
site=.venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages
case "$*" in
  venv*) exec {sys.executable} -m venv --without-pip .venv ;;
  *" torch=="*) exit $UV_TORCH_CODE ;;
  *--quiet*" pip") cp stand-in $site/pip.py ;;
esac
"""
# Stands for pip: notes what it is told, and leaves torch as installed.
PIP = """\
import os, pathlib, sys
open("pip.log", "a").write(" ".join(sys.argv[1:]) + "\\n")
number = next(word for word in sys.argv if word.startswith("torch==")).partition("==")[2]
folder = pathlib.Path(__file__).parent / f"torch-{number}.dist-info"
if not os.environ.get("PIP_FAILS"):
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: torch\\nVersion: {number}\\n")
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Runs the script with a uv that writes its variables and words into a file and installs nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    (tmp_path / "stand-in").write_text(PIP)
    (tmp_path / "megatron/launch").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    shutil.copy(ROOT / "megatron/launch/torch_builds.py", tmp_path / "megatron/launch")

    def ask(*words: str, **variables: str) -> tuple[subprocess.CompletedProcess, str, str]:
        """What the script said, what uv was told, what pip was told about torch."""
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        settings = {"PIP_CONFIG_FILE": os.devnull, "UV_TORCH_CODE": "0", "PATH": path, **variables}
        done = run(*words, folder=tmp_path, **settings)
        pip = tmp_path / "pip.log"
        return done, (tmp_path / "uv.log").read_text(), pip.read_text() if pip.exists() else ""

    return ask


def test_what_pip_is_configured_with_reaches_uv(asked, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://index\nextra-index-url =\n  file:///a\n  file:///b\n"
    )
    _, uv_log, _ = asked("--cpu", PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PIP_FIND_LINKS="/wheels /more")
    assert "UV_DEFAULT_INDEX=https://index\n" in uv_log
    assert "UV_INDEX=file:///a file:///b\n" in uv_log
    assert "UV_FIND_LINKS=/wheels,/more\n" in uv_log
    assert "--python .venv/bin/python torch==2.13.0\n" in uv_log  # any build does: only the index of one's own is asked


@pytest.mark.parametrize(
    ("words", "code", "wanted"),
    [  # uv has failed on torch's own index, also with exit code 0
        ("--cuda 12.7", "0", "torch==2.11.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126"),
        ("--cpu --torch 2.11.0", "1", "torch==2.11.0 --extra-index-url https://download.pytorch.org/whl/cpu"),
    ],
)
def test_torch_is_the_build_for_the_driver_and_pip_fetches_what_uv_does_not(asked, tmp_path, words, code, wanted):
    done, uv_log, pip = asked(*words.split(), UV_TORCH_CODE=code)
    assert f"pip install --python .venv/bin/python {wanted}\n" in uv_log
    assert "UV_INDEX_STRATEGY=unsafe-best-match\n" in uv_log
    pin = wanted.split()[0]
    assert f"uv did not install {pin}; now with pip" in done.stdout
    assert pip == f"install --quiet {wanted}\n"
    assert f"{pin}\n" in (tmp_path / ".venv/constraints.txt").read_text()
    assert "-c .venv/constraints.txt -e .[dev]" in uv_log


def test_where_pip_has_no_torch_either_it_ends_and_goes_on_later(asked, tmp_path):
    done, uv_log, pip = asked("--cpu", UV_TORCH_CODE="1", PIP_FAILS="yes")
    assert done.returncode == 1 and pip and "-e .[dev]" not in uv_log
    assert "installing torch==2.13.0 failed, with pip too" in done.stderr and "No connection?" in done.stderr
    assert (tmp_path / ".venv/unfinished").exists()
    _, uv_log, _ = asked("--cpu", UV_TORCH_CODE="1")
    assert "-e .[dev]" in uv_log and not (tmp_path / ".venv/unfinished").exists()


def test_a_driver_that_nothing_suits_ends_it(asked):
    done, uv_log, _ = asked("--cuda", "11.8")
    assert done.returncode == 1 and "torch==" not in uv_log
    assert "the driver serves CUDA 11.8, and torch needs 12 or newer" in done.stderr
    assert "no build of torch suits this machine" in done.stderr


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
    reported = subprocess.run(
        ["uv", "run", "python", "-c", versions], cwd=tree, capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": f"{tree}/.venv/bin:{os.environ['PATH']}"},
    ).stdout.split()  # fmt: skip
    assert reported[0].startswith("2.13.0") and reported[2] == str(tree / ".venv")
    assert not (tree / "uv.lock").exists()

    shutil.rmtree(tree / ".venv")
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}
    refused = run("--cpu", folder=tree, UV_CACHE_DIR=str(tmp_path / "none"), UV_HTTP_RETRIES="0", **nowhere)
    assert refused.returncode == 1
    assert "installing torch==2.13.0 failed, with pip too" in refused.stderr and "No connection?" in refused.stderr
