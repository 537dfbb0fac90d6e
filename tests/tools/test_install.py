"""setup_uv_env.sh and the wheel; the whole of them with `make test-install`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.launch.runs import ROOT, write_program

SCRIPT = ROOT / "setup_uv_env.sh"
NOT_COPIED = (".git", ".venv", ".cache", "__pycache__", "checkpoints", "logs", "data", ".mypy_cache", "*.egg-info")


def set_up(*words: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    command, env = ["bash", "setup_uv_env.sh", *words], {**os.environ, "PY": sys.executable, **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)


def test_the_script_is_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPT)], check=True)


@pytest.mark.parametrize(("words", "message"), [
    (("--gpu",), "--gpu is not an option; known are --cpu, --cuda, --torch"),
    (("--cuda",), "--cuda needs a version, as --cuda 12.6"),
    (("--cpu", "--flash-attn"), "--flash-attn needs CUDA"),
])  # fmt: skip
def test_words_it_cannot_follow_are_refused(words, message):
    done = set_up(*words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"setup_uv_env.sh: error: {message}")


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
def run_script(tmp_path, monkeypatch):
    """Runs the script with a uv that writes its variables and words into a file and installs nothing."""
    write_program(tmp_path / "bin/uv", UV)
    (tmp_path / "stand-in").write_text(PIP)
    (tmp_path / "megatron/launch").mkdir(parents=True)
    for name in (SCRIPT.name, "constraints.txt", *(f"megatron/launch/{n}.py" for n in ("torch_builds", "cuda_driver"))):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "megatron/process", tmp_path / "megatron/process")

    def ask(*words: str, **variables: str) -> tuple[subprocess.CompletedProcess, str, str]:
        """Returns the finished script, the log of uv, and pip's arguments about torch."""
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        settings = {"PIP_CONFIG_FILE": os.devnull, "UV_TORCH_CODE": "0", "PATH": path, **variables}
        done = set_up(*words, folder=tmp_path, **settings)
        pip = tmp_path / "pip.log"
        return done, (tmp_path / "uv.log").read_text(), pip.read_text() if pip.exists() else ""

    return ask


def test_what_pip_is_configured_with_reaches_uv(run_script, tmp_path):
    lines = "[global]", "index-url = https://index", "extra-index-url =", "  file:///a", "  file:///b"
    (tmp_path / "pip.conf").write_text("\n".join(lines) + "\n")
    _, uv_log, _ = run_script("--cpu", PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PIP_FIND_LINKS="/wheels /more")
    assert "UV_DEFAULT_INDEX=https://index\n" in uv_log
    assert "UV_INDEX=file:///a file:///b\n" in uv_log
    assert "UV_FIND_LINKS=/wheels,/more\n" in uv_log
    assert "--python .venv/bin/python torch==2.13.0\n" in uv_log  # any build does: only the index of one's own is asked


@pytest.mark.parametrize(("words", "code", "pin", "index"), [  # uv has failed on torch's index, also with exit code 0
    ("--cuda 12.7", "0", "torch==2.11.0+cu126", "cu126"),
    pytest.param("--cpu --torch 2.11.0", "1", "torch==2.11.0", "cpu", marks=pytest.mark.more),
])  # fmt: skip
def test_torch_is_the_build_for_the_driver_and_pip_fetches_what_uv_does_not(
    run_script, tmp_path, words, code, pin, index
):
    done, uv_log, pip = run_script(*words.split(), UV_TORCH_CODE=code)
    requested = f"{pin} --extra-index-url https://download.pytorch.org/whl/{index}"
    assert f"pip install --python .venv/bin/python {requested}\n" in uv_log
    assert "UV_INDEX_STRATEGY=unsafe-best-match\n" in uv_log
    assert f"uv did not install {pin}; now with pip" in done.stdout
    assert pip == f"install --quiet {requested}\n"
    assert f"{pin}\n" in (tmp_path / ".venv/constraints.txt").read_text()
    assert "-c .venv/constraints.txt -e .[dev]" in uv_log


def test_where_pip_has_no_torch_either_it_ends_and_goes_on_later(run_script, tmp_path):
    done, uv_log, pip = run_script("--cpu", UV_TORCH_CODE="1", PIP_FAILS="yes")
    assert done.returncode == 1 and pip and "-e .[dev]" not in uv_log
    assert "installing torch==2.13.0 failed, with pip too" in done.stderr and "No connection?" in done.stderr
    assert (tmp_path / ".venv/unfinished").exists()
    _, uv_log, _ = run_script("--cpu", UV_TORCH_CODE="1")
    assert "-e .[dev]" in uv_log and not (tmp_path / ".venv/unfinished").exists()


def test_a_driver_that_nothing_suits_ends_it(run_script):
    done, uv_log, _ = run_script("--cuda", "11.8")
    assert done.returncode == 1 and "torch==" not in uv_log
    assert "the driver supports CUDA 11.8, and torch needs 12 or newer" in done.stderr
    assert "no build of torch suits this machine" in done.stderr


@pytest.mark.install
@pytest.mark.timeout(1800)
def test_from_nothing_interrupted_again_and_without_a_network(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    shutil.copytree(ROOT / "tests/data", tree / "tests/data", dirs_exist_ok=True)
    shutil.copytree(ROOT / "megatron/data", tree / "megatron/data", dirs_exist_ok=True)
    env = {**os.environ, "PY": sys.executable, "UV_CACHE_DIR": str(tmp_path / "cache")}
    first_run = subprocess.Popen(["bash", "setup_uv_env.sh", "--cpu"], cwd=tree, env=env, start_new_session=True)
    while not list(tree.glob(".venv/lib/python*/site-packages/torch")):
        assert first_run.poll() is None
        time.sleep(0.1)
    os.killpg(first_run.pid, signal.SIGKILL)
    first_run.wait()
    done = set_up("--cpu", folder=tree, UV_CACHE_DIR=str(tmp_path / "cache"))
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
    refused = set_up("--cpu", folder=tree, UV_CACHE_DIR=str(tmp_path / "none"), UV_HTTP_RETRIES="0", **nowhere)
    assert refused.returncode == 1
    assert "installing torch==2.13.0 failed, with pip too" in refused.stderr and "No connection?" in refused.stderr


BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
NEOX = "import sys; sys.argv[0] = 'neox'; from megatron.launch.command import main; sys.exit(main())"
SOURCES = ("megatron", "tools", "huggingface", "configs", "post-training", "slurm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: nothing is left in the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))]:
        shutil.copy(path, tree, follow_symlinks=False)
    done = subprocess.run([sys.executable, "-c", BUILD, str(tree)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(tree.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def test_two_folders_with_all_that_a_clone_has(site):
    assert {path.name for path in site.iterdir()} == {"megatron", "neox", "neox-0.1.0.dist-info"}
    assert "neox = megatron.launch.command:command" in next(site.glob("*.dist-info/entry_points.txt")).read_text()
    patterns = ("*.py", "tools/**/*.py", "configs/**/*.*", "post-training/**/*.*", "slurm/sites/*")
    expected = {path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)}
    expected -= {
        Path("setup.py"),
        *(path for path in expected if path.parts[:2] in (("tools", "docs"), ("tools", "lint"))),
    }
    assert len(expected) > 80
    installed = {path.relative_to(site / "neox") for path in site.glob("neox/**/*") if path.is_file()}
    expected |= {path.relative_to(ROOT) for path in ROOT.glob("huggingface/*.py")}
    expected = {path for path in expected if not (ROOT / path).is_symlink()} - {
        Path("tools/retired.py")
    }  # of a clone alone
    assert installed == expected
    assert list(site.glob("megatron/evaluation/tasks/*.yaml")) and not list(site.glob("**/*.pyc"))


def test_the_command_finds_scripts_tools_and_presets(site, tmp_path):
    def neox(*words):
        command, env = [sys.executable, "-c", NEOX, *words], {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    done = neox("--help")
    assert done.returncode == 0 and " preprocess_data " in done.stdout and f"{site}/neox/configs" in done.stdout
    done = neox("train", "quickstart", "local_setup", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f" {site}/neox/train.py --neox-args " in done.stdout
    assert f"presets: {site}/neox/configs/quickstart.yml, {site}/neox/configs/local_setup.yml" in done.stderr
    done = neox("datasets/verify", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: verify.py"), done.stderr
    assert neox("train", "nothing.yml").stderr.startswith("deepy.py: error: nothing.yml: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.install
@pytest.mark.timeout(1800)
def test_it_trains_the_quickstart_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python, neox = tmp_path / "env/bin/python", tmp_path / "env/bin/neox"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        done = subprocess.run([str(word) for word in words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    builds = run(sys.executable, "-I", ROOT / "megatron/launch/torch_builds.py").split()
    run(python, "-m", "pip", "install", "-q", *builds)
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    run(neox, "quickstart_data")
    log = run(neox, "train", "--num_gpus", "2", "quickstart", "local_setup", "--set", "train_iters=20",
               "lr_decay_iters=20", "eval_interval=20", "eval_iters=2", "pipe_parallel_size=2")  # fmt: skip
    losses = [float(loss) for loss in re.findall(r"lm_loss: ([\d.E+-]+)", log)]
    assert losses and losses[-1] < losses[0]
    assert (tmp_path / "checkpoints/quickstart/latest").read_text() == "global_step20"
    run(neox, "ckpts/verify", "checkpoints/quickstart")
    run(neox, "generate", "quickstart", "local_setup", "text_generation", "-o", "out.jsonl")
    assert (tmp_path / "out.jsonl").stat().st_size
    run(python, "-m", "pip", "install", "-q", "--no-deps", "megatron-core==0.16.1")  # its own needs are not ours
    script = "import megatron.core, megatron.launch; print(megatron.core.__version__, megatron.launch.install_root())"
    assert run(python, "-c", script).split() == [
        "0.16.1",
        str(next(tmp_path.glob("env/lib/python*/site-packages/neox"))),
    ]
