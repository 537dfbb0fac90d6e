"""The rendered command in four processes: it trains as one does, and goes on when a pod is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch.devices import free_port
from megatron.launch.kubernetes import KINDS, as_yaml, pod_config, read_site, render
from megatron.launch.start import _exit_code
from megatron.launch.watch import Outcome
from megatron.neox_arguments import NeoXArgs
from tests.launch.runs import ROOT
from tests.training.runs import ADAMW, LLAMA, config, metric_rows

Documents, Losses = list[dict[str, Any]], dict[int, float]
PodCommands = list[tuple[list[str], dict[str, str]]]
"""The command and the environment of each pod."""
STEPS = 12


def find_document(documents: Documents, kind: str) -> list[Any]:
    return [document for document in documents if document["kind"] == kind]


def container_environment(documents: Documents, container: Mapping[str, Any]) -> dict[str, str]:
    """Resolves envFrom and env as the kubelet does; there are no secrets, and all are optional."""
    maps = {body["metadata"]["name"]: body["data"] for body in find_document(documents, "ConfigMap")}
    environment: dict[str, str] = {}
    for source in container["envFrom"]:
        environment |= maps[source["configMapRef"]["name"]]
    assert all(entry["valueFrom"]["secretKeyRef"]["optional"] for entry in container["env"])
    return environment


def pytorchjob_pods(documents: Documents) -> PodCommands:
    """(command, environment) of each pod, with what the Training Operator adds (its
    pkg/controller.v1/pytorch, envvar.go); env comes before envFrom."""
    [job] = find_document(documents, "PyTorchJob")
    replicas, per_node = job["spec"]["pytorchReplicaSpecs"], int(job["spec"]["nprocPerNode"])
    pods = [replicas["Master"]] + [replicas["Worker"]] * replicas["Worker"]["replicas"]
    [master] = replicas["Master"]["template"]["spec"]["containers"]
    port = next(p["containerPort"] for p in master["ports"] if p["name"] == "pytorchjob-port")
    commands = []
    for rank, pod in enumerate(pods):
        [container] = pod["template"]["spec"]["containers"]
        injected = {"PYTHONUNBUFFERED": "1", "MASTER_PORT": str(port), "PET_MASTER_PORT": str(port),
                    "MASTER_ADDR": "127.0.0.1", "PET_MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(len(pods) * per_node),
                    "RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NNODES": str(len(pods)),
                    "PET_NPROC_PER_NODE": str(per_node)}  # fmt: skip
        commands.append((list(container["command"]), container_environment(documents, container) | injected))
    return commands


def trainjob_pods(documents: Documents, port: int) -> PodCommands:
    """The same of a TrainJob. port: instead of the 29400 that the trainer always says."""
    [job], [runtime] = find_document(documents, "TrainJob"), find_document(documents, "TrainingRuntime")
    trainer, template = job["spec"]["trainer"], runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    [container] = template["template"]["spec"]["template"]["spec"]["containers"]
    pods = []
    for index in range(trainer["numNodes"]):
        injected = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                    "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
                    "JOB_COMPLETION_INDEX": str(index)}  # fmt: skip
        pods.append((list(trainer["command"]), container_environment(documents, container) | injected))
    return pods


class Pods:
    """The pods of a job. Paths of the manifest that are folders in a pod become folders here."""

    def __init__(self, pods: PodCommands, folders: Mapping[str, Path], log_dir: Path) -> None:
        self._pods, self._folders, self._log_dir = pods, folders, log_dir
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.restarts = [0] * len(pods)
        log_dir.mkdir(exist_ok=True)

    def _local_paths(self, text: str) -> str:
        for pod_folder, local_folder in self._folders.items():
            text = text.replace(pod_folder, str(local_folder))
        return text

    def start(self, rank: int) -> None:
        command, environment = self._pods[rank]
        words = [sys.executable, *map(self._local_paths, command[1:])]
        assert command[0] == "python"
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        variables |= {name: self._local_paths(value) for name, value in environment.items()}
        with (self._log_dir / f"pod-{rank}.log").open("ab") as log:
            self.processes[rank] = subprocess.Popen(words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL,
                                                    stdout=log, stderr=log, start_new_session=True)  # fmt: skip

    def kill(self, rank: int) -> None:
        """End a pod as a node that goes away does: all its processes at once, without a word."""
        for pid in reversed(tree(self.processes[rank].pid)):
            os.kill(pid, signal.SIGKILL)
        self.processes[rank].wait()

    def run(self, restart: bool, timeout_s: float, meanwhile: Any = lambda: None, max_starts: int = 40) -> list[int]:
        """Starts all pods, waits until all have succeeded, and returns the exit codes.

        restart: restarts failed pods, at most `max_starts` starts in all, as `restartPolicy: OnFailure` with
        `backoffLimit` does.
        """
        for rank in range(len(self._pods)):
            self.start(rank)
        end = time.monotonic() + timeout_s
        try:
            while time.monotonic() < end:
                meanwhile()
                codes = [process.poll() for process in self.processes.values()]
                if None not in codes and not (restart and any(codes)):
                    return codes
                for rank, code in enumerate(codes):
                    if restart and code:
                        assert sum(self.restarts) < max_starts, "backoffLimit"
                        self.restarts[rank] += 1
                        time.sleep(0.5)
                        self.start(rank)
                time.sleep(0.1)
            raise AssertionError(f"the pods did not end within {timeout_s:.0f} s\n{self.logs()}")
        finally:
            for rank, process in self.processes.items():
                if process.poll() is None:
                    self.kill(rank)

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self._log_dir.iterdir()))


def tree(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(descendant for child in children for descendant in tree(int(child)))]


def tiny(folder: Path) -> Path:
    """A file of a tiny run that saves where OUTPUT_DIR says."""
    values: dict[str, Any] = config(
        LLAMA, ADAMW, train_iters=STEPS, checkpoint_factor=4, distributed_backend="gloo", train_batch_size=None,
        train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1, save="${OUTPUT_DIR}/run",
    )  # fmt: skip
    (folder / "tiny.yml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yml"


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    values = {
        "namespace": "a", "image": "registry/neox:1.0", "claims": {"models-pvc": {"path": "/shared/models"}},
        "metrics_port": free_port(), "variables": {"MASTER_PORT": free_port()},
    }  # fmt: skip
    (tmp_path / "site.yml").write_text(yaml.safe_dump(values))
    site = read_site(tmp_path / "site.yml")
    # Seconds, not half an hour: a test that fails shall end
    config = pod_config([str(tiny(tmp_path))], site, ["rendezvous_timeout_s=60"])
    return list(yaml.safe_load_all("".join(map(as_yaml, render(site, config, tuple(KINDS))))))


def folders(documents: Documents, place: Path) -> Mapping[str, Path]:
    """The pods' folders, of which /etc/neox holds what the ConfigMap does."""
    files = next(body["data"] for body in find_document(documents, "ConfigMap") if "config" in body["metadata"]["name"])
    for name in ("etc", "models"):
        (place / name).mkdir(parents=True)
    for name, text in files.items():
        (place / "etc" / name).write_text(text)
    return {"/etc/neox": place / "etc", "/shared/models": place / "models"}


def losses(save: Path) -> dict[int, float]:
    return {row["iteration"]: row["train/lm_loss"] for row in metric_rows(save)}


@pytest.fixture(scope="module")
def one_process_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process with the batch of four."""
    folder = tmp_path_factory.mktemp("one_process_losses")
    environment = {**os.environ, "OUTPUT_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    words = ["train.py", str(tiny(folder)), "--set", "gradient_accumulation_steps=4"]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, capture_output=True)
    return losses(folder / "run")


def assert_same(losses: dict[int, float], expected: dict[int, float]) -> None:
    assert list(losses) == list(expected) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.product
def test_four_pods_train_as_one_process(documents: Documents, one_process_losses: Losses, tmp_path: Path) -> None:
    commands = trainjob_pods(documents, free_port())
    assert len(commands) == 4
    pods = Pods(commands, folders(documents, tmp_path / "pod"), tmp_path / "logs")
    assert pods.run(restart=False, timeout_s=280) == [0, 0, 0, 0], pods.logs()
    assert_same(losses(tmp_path / "pod" / "models" / "run"), one_process_losses)


def once_saved(save: Path, do: Callable[[], None]) -> Callable[[], None]:
    done = []

    def look() -> None:
        if not done and (save / "latest").exists():
            done.append(do())

    return look


@pytest.mark.parametrize("lost", [
    pytest.param(0, id="master", marks=pytest.mark.product), pytest.param(2, id="worker", marks=pytest.mark.product),
])  # fmt: skip
def test_a_lost_pod_comes_back_and_goes_on(
    lost: int, documents: Documents, one_process_losses: Losses, tmp_path: Path
) -> None:
    pods = Pods(pytorchjob_pods(documents), folders(documents, tmp_path / "pod"), tmp_path / "logs")
    save = tmp_path / "pod" / "models" / "run"
    pods.run(restart=True, timeout_s=280, meanwhile=once_saved(save, lambda: pods.kill(lost)))
    assert_same(losses(save), one_process_losses)
    assert sum(pods.restarts) >= 4, "the others ended too, instead of waiting for it"
    resumed = (save / "logs" / "rank_0.log").read_text()
    assert re.search(r"from .*global_step\d+, iteration \d+", resumed), resumed[-3000:]


@pytest.mark.parametrize(("pod", "number", "status", "code"), [
    (True, 15, "stopped", 143), (True, 15, "finished", 0), (True, 0, "stopped", 0), (False, 15, "stopped", 0),
])  # fmt: skip
def test_the_exit_code_of_a_drained_pod(pod: bool, number: int, status: str, code: int, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for name in ("PET_NODE_RANK", "PET_NNODES"):
        monkeypatch.setenv(name, "1" if pod else "")
    (tmp_path / "status.json").write_text(json.dumps({"status": status}))
    args = NeoXArgs.from_dict(config(LLAMA, save=str(tmp_path), checkpoint_factor=1))
    assert _exit_code(args, Outcome(0, signal=number)) == code


@pytest.mark.product
@pytest.mark.ends_processes
def test_a_drained_pod_does_not_end_the_job_as_done(
    documents: Documents, one_process_losses: Losses, tmp_path: Path
) -> None:
    """SIGTERM to one pod has all ranks save and stop; with code 0 operators would count the job as done."""
    pods = Pods(pytorchjob_pods(documents), folders(documents, tmp_path / "pod"), tmp_path / "logs")
    save = tmp_path / "pod" / "models" / "run"
    drain = once_saved(save, lambda: pods.processes[3].send_signal(signal.SIGTERM))
    pods.run(restart=True, timeout_s=280, meanwhile=drain)
    assert pods.restarts == [1, 1, 1, 1], pods.logs()
    assert_same(losses(save), one_process_losses)
