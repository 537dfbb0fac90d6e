"""The wheel: what it holds, that its command works without a clone, and (make test-install) that it
trains."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
NEOX = "import sys; sys.argv[0] = 'neox'; from megatron.launch.command import main; sys.exit(main())"
SOURCES = ("megatron", "tools", "huggingface", "configs", "post-training", "slurm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: nothing is left in the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))]:
        shutil.copy(path, tree)
    done = subprocess.run([sys.executable, "-c", BUILD, str(tree)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(tree.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


@pytest.fixture
def neox(site, tmp_path):
    def run(*words):
        command, env = [sys.executable, "-c", NEOX, *words], {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


def test_two_folders_with_all_that_a_clone_has(site):
    assert {path.name for path in site.iterdir()} == {"megatron", "neox", "neox-0.1.0.dist-info"}
    assert "neox = megatron.launch.command:main" in next(site.glob("*.dist-info/entry_points.txt")).read_text()
    patterns = ("*.py", "tools/**/*.py", "configs/**/*.*", "post-training/**/*.*", "slurm/sites/*")
    wanted = {path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)}
    wanted -= {Path("setup.py"), *(path for path in wanted if path.parts[:2] == ("tools", "docs"))}
    assert len(wanted) > 80
    installed = {path.relative_to(site / "neox") for path in site.glob("neox/**/*") if path.is_file()}
    wanted |= {path.relative_to(ROOT) for path in ROOT.glob("huggingface/*.py")}
    assert installed == wanted
    assert list(site.glob("megatron/evaluation/tasks/*.yaml")) and not list(site.glob("**/*.pyc"))


def test_the_command_finds_scripts_tools_and_presets(neox, site, tmp_path):
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
    both = "import megatron.core, megatron.launch; print(megatron.core.__version__, megatron.launch.install_root())"
    assert run(python, "-c", both).split() == ["0.16.1", str(next(tmp_path.glob("env/lib/python*/site-packages/neox")))]
