"""The rendered command in four local processes under the variables of the operators: it trains as one process
does, and goes on when a pod is lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch.kubernetes import KINDS, as_yaml, pod_config, read_site, render
from tests.launch.kubernetes.pods import ROOT, Pods, free_port, pytorchjob_pods, trainjob_pods
from tests.training.runs import ADAMW, LLAMA, config

SITE = """\
namespace: a
image: registry/neox:1.0
claims:
  models-pvc: {{path: /shared/models}}
metrics_port: {metrics_port}
variables: {{MASTER_PORT: {port}}}
"""
STEPS = 12


def tiny(folder: Path) -> Path:
    """A file of a tiny run that saves where OUTPUT_DIR says."""
    values: dict[str, Any] = config(
        LLAMA, ADAMW, train_iters=STEPS, checkpoint_factor=4, distributed_backend="gloo", train_batch_size=None,
        train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1, save="${OUTPUT_DIR}/run",
    )  # fmt: skip
    (folder / "tiny.yml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yml"


@pytest.fixture
def documents(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "site.yml").write_text(SITE.format(port=free_port(), metrics_port=free_port()))
    site = read_site(tmp_path / "site.yml")
    # Seconds, not half an hour: a test that fails shall end
    made = pod_config([str(tiny(tmp_path))], site, ["rendezvous_timeout_s=60"])
    return list(yaml.safe_load_all("".join(map(as_yaml, render(site, made, tuple(KINDS))))))


def folders(documents: list[dict[str, Any]], place: Path) -> Mapping[str, Path]:
    """The pods' folders, of which /etc/neox holds what the ConfigMap does."""
    files = next(b["data"] for b in documents if b["kind"] == "ConfigMap" and "config" in b["metadata"]["name"])
    (place / "etc").mkdir(parents=True)
    (place / "models").mkdir()
    for name, text in files.items():
        (place / "etc" / name).write_text(text)
    return {"/etc/neox": place / "etc", "/shared/models": place / "models"}


def losses(save: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (save / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["train/lm_loss"] for row in rows if "train/lm_loss" in row}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process with the batch of four."""
    folder = tmp_path_factory.mktemp("alone")
    environment = {**os.environ, "OUTPUT_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    words = ["train.py", str(tiny(folder)), "--set", "gradient_accumulation_steps=4"]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, capture_output=True)
    return losses(folder / "run")


def assert_same(found: dict[int, float], wanted: dict[int, float]) -> None:
    assert list(found) == list(wanted) == list(range(1, STEPS + 1))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
def test_four_pods_train_as_one_process(
    kind: str, documents: list[dict[str, Any]], alone: dict[int, float], tmp_path: Path
) -> None:
    made = pytorchjob_pods(documents) if kind == "PyTorchJob" else trainjob_pods(documents, free_port())
    assert len(made) == 4
    pods = Pods(made, folders(documents, tmp_path / "pod"), tmp_path / "logs")
    assert pods.run(restart=False, timeout_s=180) == [0, 0, 0, 0], pods.logs()
    assert_same(losses(tmp_path / "pod" / "models" / "run"), alone)


def once_saved(save: Path, do: Callable[[], None]) -> Callable[[], None]:
    """Calls `do` once, when the run has its first checkpoint."""
    done = []

    def look() -> None:
        if not done and (save / "latest").exists():
            done.append(do())

    return look


@pytest.mark.parametrize(
    "lost", [pytest.param(0, id="master", marks=pytest.mark.product), pytest.param(2, id="worker", marks=pytest.mark.more)]
)
def test_a_lost_pod_comes_back_and_the_run_goes_on(
    lost: int, documents: list[dict[str, Any]], alone: dict[int, float], tmp_path: Path
) -> None:
    pods = Pods(pytorchjob_pods(documents), folders(documents, tmp_path / "pod"), tmp_path / "logs")
    save = tmp_path / "pod" / "models" / "run"
    pods.run(restart=True, timeout_s=240, meanwhile=once_saved(save, lambda: pods.kill(lost)))
    assert_same(losses(save), alone)
    assert sum(pods.restarts) >= 4, "the others ended too, instead of waiting for it"
    resumed = (save / "logs" / "rank_0.log").read_text()
    assert "loaded checkpoint" in resumed.lower() or "goes on" in resumed.lower(), resumed[-3000:]


@pytest.mark.more
def test_a_drained_pod_does_not_end_the_job_as_done(
    documents: list[dict[str, Any]], alone: dict[int, float], tmp_path: Path
) -> None:
    """SIGTERM to one pod has all ranks save and stop; with code 0 operators would count the job as done."""
    pods = Pods(pytorchjob_pods(documents), folders(documents, tmp_path / "pod"), tmp_path / "logs")
    save = tmp_path / "pod" / "models" / "run"

    def drain() -> None:
        process = pods.processes[3]
        assert process is not None
        process.send_signal(signal.SIGTERM)

    pods.run(restart=True, timeout_s=240, meanwhile=once_saved(save, drain))
    assert pods.restarts == [1, 1, 1, 1], pods.logs()
    assert_same(losses(save), alone)
