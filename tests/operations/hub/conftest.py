"""A trained run with five checkpoints, and a Hub to publish them on."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, utils

from tests.launch.runs import ROOT
from tests.operations.hub.loopback_hub import TOKEN, LoopbackHub
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

COMMAND = [sys.executable, "huggingface/upload_and_evaluate_checkpoint.py"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of five steps, each saved."""
    save = tmp_path_factory.mktemp("trained") / "checkpoints" / "tiny=run"
    keys = {"save": str(save), "train_iters": 5, "checkpoint_factor": 1, "hidden_size": 128, "num_layers": 4}
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, **keys, num_attention_heads=4))
    return save


@pytest.fixture
def save(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "checkpoints" / trained.name, copy_function=os.link))


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub().serving() as running_hub:
        yield running_hub


@pytest.fixture
def client(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """huggingface_hub's client in this process, which reads its environment once, talks to `hub`."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    verbosity = utils.logging.get_verbosity()
    yield
    huggingface_hub.set_client_factory(utils._http.default_client_factory)
    utils.logging.set_verbosity(verbosity)


@pytest.fixture
def environment(hub: LoopbackHub, tmp_path: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NEOX_")}
    return {**inherited, **hub.environment(), "HF_HOME": str(tmp_path / "hf_home"), "PYTHONPATH": str(ROOT)}


@pytest.fixture
def upload(environment: dict[str, str], save: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        options = ["--experiment_name", str(save), "--retry-min-wait", "0.05", "--retry-max-wait", "0.2"]
        options_of_run = {"env": {**environment, **variables}, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([*COMMAND, *options, *words], cwd=ROOT, **options_of_run)

    return run
