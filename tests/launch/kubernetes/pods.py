"""Pods as local processes: the command and variables of a rendered manifest, with what the operator injects,
started again as a kubelet does."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def of_kind(documents: Sequence[Mapping[str, Any]], kind: str) -> list[Any]:
    return [document for document in documents if document["kind"] == kind]


def container_environment(documents: Sequence[Mapping[str, Any]], container: Mapping[str, Any]) -> dict[str, str]:
    """What the kubelet makes of envFrom and env; of secrets there are none, and all are optional."""
    maps = {body["metadata"]["name"]: body["data"] for body in of_kind(documents, "ConfigMap")}
    environment: dict[str, str] = {}
    for source in container["envFrom"]:
        environment |= maps[source["configMapRef"]["name"]]
    assert all(entry["valueFrom"]["secretKeyRef"]["optional"] for entry in container["env"])
    return environment


def pytorchjob_pods(documents: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], dict[str, str]]]:
    """(command, environment) of each pod, with what the Training Operator adds (its
    pkg/controller.v1/pytorch, envvar.go); env comes before envFrom."""
    [job] = of_kind(documents, "PyTorchJob")
    replicas, per_node = job["spec"]["pytorchReplicaSpecs"], int(job["spec"]["nprocPerNode"])
    pods = [replicas["Master"]] + [replicas["Worker"]] * replicas["Worker"]["replicas"]
    [master] = replicas["Master"]["template"]["spec"]["containers"]
    port = next(p["containerPort"] for p in master["ports"] if p["name"] == "pytorchjob-port")
    made = []
    for rank, pod in enumerate(pods):
        [container] = pod["template"]["spec"]["containers"]
        injected = {
            "PYTHONUNBUFFERED": "1", "MASTER_PORT": str(port), "PET_MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(len(pods) * per_node), "RANK": str(rank),
            "PET_NODE_RANK": str(rank), "PET_NNODES": str(len(pods)), "PET_NPROC_PER_NODE": str(per_node),
        }  # fmt: skip
        made.append((list(container["command"]), container_environment(documents, container) | injected))
    return made


def trainjob_pods(documents: Sequence[Mapping[str, Any]], port: int) -> list[tuple[list[str], dict[str, str]]]:
    """The same of a TrainJob. port: instead of the 29400 that the trainer always says."""
    [job], [runtime] = of_kind(documents, "TrainJob"), of_kind(documents, "TrainingRuntime")
    trainer, template = job["spec"]["trainer"], runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    [container] = template["template"]["spec"]["template"]["spec"]["containers"]
    made = []
    for index in range(trainer["numNodes"]):
        injected = {
            "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
            "JOB_COMPLETION_INDEX": str(index),
        }  # fmt: skip
        made.append((list(trainer["command"]), container_environment(documents, container) | injected))
    return made


class Pods:
    """The pods of a job. Paths of the manifest that are folders in a pod become folders here."""

    def __init__(
        self, pods: Sequence[tuple[list[str], dict[str, str]]], folders: Mapping[str, Path], log_dir: Path
    ) -> None:
        self._pods, self._folders, self._log_dir = pods, folders, log_dir
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * len(pods)
        self.restarts = [0] * len(pods)
        log_dir.mkdir(exist_ok=True)

    def _here(self, text: str) -> str:
        for there, here in self._folders.items():
            text = text.replace(there, str(here))
        return text

    def start(self, rank: int) -> None:
        """Start the container of a pod as it is started each time."""
        command, environment = self._pods[rank]
        words = [sys.executable, *map(self._here, command[1:])]
        assert command[0] == "python"
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        variables |= {name: self._here(value) for name, value in environment.items()}
        with (self._log_dir / f"pod-{rank}.log").open("ab") as log:
            self.processes[rank] = subprocess.Popen(
                words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def kill(self, rank: int) -> None:
        """End a pod as a node that goes away does: all its processes at once, without a word."""
        process = self.processes[rank]
        assert process is not None
        for pid in reversed(tree(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def run(self, restart: bool, timeout_s: float, meanwhile: Any = lambda: None, most: int = 40) -> list[int]:
        """Start all pods and wait until all have succeeded; the exit codes. restart: start those that end
        with an error again, at most `most` times in all, as `restartPolicy: OnFailure` and `backoffLimit`."""
        for rank in range(len(self._pods)):
            self.start(rank)
        end = time.monotonic() + timeout_s
        try:
            while time.monotonic() < end:
                meanwhile()
                codes = [process.poll() if process is not None else None for process in self.processes]
                if None not in codes and (not restart or not any(codes)):
                    return [code for code in codes if code is not None]
                for rank, code in enumerate(codes):
                    if restart and code:
                        assert sum(self.restarts) < most, "backoffLimit"
                        self.restarts[rank] += 1
                        time.sleep(0.5)
                        self.start(rank)
                time.sleep(0.1)
            raise AssertionError(f"the pods did not end within {timeout_s:.0f} s\n{self.logs()}")
        finally:
            for rank, process in enumerate(self.processes):
                if process is not None and process.poll() is None:
                    self.kill(rank)

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self._log_dir.iterdir()))


def tree(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in tree(int(child)))]
