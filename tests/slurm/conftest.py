"""A real Slurm of two virtual nodes with pretended GPUs for all tests here, and a clone to submit from."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.runs import ROOT
from tests.training.runs import ADAMW, LLAMA, config, metric_rows

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb", "sacct")
NODES = ("n1", "n2")
END_STATES = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
OPTIONS = ("--oversubscribe", "--mem=100", "--cpus-per-task=2", "--gres=none")  # jobs that share two nodes
WAIT_S = 120

_SLURM = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
{accounting}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait=3
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=40 RealMemory=600000 Gres=gpu:4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=40 RealMemory=600000 Gres=gpu:4
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
_NO_ACCOUNTING = "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none"
_ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={database_port}
AccountingStoragePass={folder}/munge.sock"""
_SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
DbdHost=localhost
DbdPort={database_port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=x
StorageLoc=slurm_acct_db
"""
_SQL = (
    "create database slurm_acct_db; "
    "create user 'slurm'@'127.0.0.1' identified by 'x'; create user 'slurm'@'localhost' identified by 'x'; "
    "grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1'; grant all on slurm_acct_db.* to 'slurm'@'localhost';"
)
_GRES = "NodeName=n[1-2] Name=gpu Count=4 File=/dev/tty[0-3]\n"
_CGROUP = "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n"


def missing(accounting: bool = False) -> str:
    """Why no cluster can be made here; empty where one can."""
    absent = [name for name in PROGRAMS + (ACCOUNTING if accounting else ()) if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed; `make test-slurm` installs them"
    return "" if os.geteuid() == 0 else "only root can start slurmd"


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def wait_for(ready: Callable[[], bool], seconds: float, message: Callable[[], str]) -> None:
    """Fails with what is said then."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, message()
        time.sleep(0.2)


class Cluster:
    """Up from `start` to `stop`. accounting: whether sacct can be asked. environment: of its clients."""

    def __init__(self, folder: Path, accounting: bool = False) -> None:
        self.folder, self.accounting = folder, accounting
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        controller, node1, node2, database, sql = _free_ports(5)
        accounting = _ACCOUNTING if self.accounting else _NO_ACCOUNTING
        (self.folder / "slurm.conf").write_text(
            _SLURM.format(
                host=socket.gethostname().split(".")[0], folder=self.folder, port=controller, node1=node1, node2=node2,
                accounting=accounting.format(folder=self.folder, database_port=database),
            )
        )  # fmt: skip
        (self.folder / "gres.conf").write_text(_GRES)
        (self.folder / "cgroup.conf").write_text(_CGROUP)
        self.run("munged", f"--key-file={key}", f"--socket={self.folder}/munge.sock",
                 f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                 f"--seed-file={self.folder}/munge.seed", "--force")  # fmt: skip
        if self.accounting:
            self._start_accounting(database, sql)
        self.run("slurmctld", "-c")
        for node in NODES:
            self.run("slurmd", "-N", node, "-c")
        self._wait(lambda: self.run("sinfo", "--noheader", "--format=%T").strip() == "idle", "slurmctld.log")

    def _start_accounting(self, database_port: int, sql_port: int) -> None:
        folder, socket_file = self.folder, self.folder / "my.sock"
        method = "--auth-root-authentication-method=normal"
        self.run("mariadb-install-db", "--user=root", f"--datadir={folder}/db", method)
        with (folder / "mariadb.log").open("w") as log:
            subprocess.Popen(
                ["mariadbd", "--user=root", f"--datadir={folder}/db", f"--socket={socket_file}", f"--port={sql_port}",
                 "--bind-address=127.0.0.1", f"--pid-file={folder}/mariadbd.pid", "--innodb-buffer-pool-size=64M"],
                env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        sql = ("mariadb", "-uroot", f"--socket={socket_file}", "-e")
        self._wait(lambda: self._works(*sql, "select 1"), "mariadb.log")
        self.run(*sql, _SQL)
        file = folder / "slurmdbd.conf"
        file.write_text(_SLURMDBD.format(folder=folder, database_port=database_port, sql_port=sql_port))
        file.chmod(0o600)
        self.run("slurmdbd")
        self._wait(lambda: self._works("sacctmgr", "-i", "add", "cluster", "test"), "slurmdbd.log")

    def _works(self, *command: str) -> bool:
        return subprocess.run(command, env=self.environment, capture_output=True, timeout=60).returncode == 0

    def _wait(self, ready: Callable[[], bool], log: str) -> None:
        wait_for(ready, 30, (self.folder / log).read_text)

    def stop(self) -> None:
        subprocess.run(["scancel", "--full", "--user=root"], env=self.environment, capture_output=True)
        # A step that has not ended when slurmd does stays for ever.
        queue = ["squeue", "--noheader", "--states=RUNNING,COMPLETING,SUSPENDED"]
        deadline = time.monotonic() + 30
        while subprocess.run(queue, env=self.environment, capture_output=True).stdout and time.monotonic() < deadline:
            time.sleep(0.2)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "slurmdbd", "mariadbd", "munged"):
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGTERM)

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Output of a command of Slurm's; fails with what it said."""
        env = {**self.environment, **variables}
        done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for socket_ in sockets:
            socket_.bind(("127.0.0.1", 0))
        return [socket_.getsockname()[1] for socket_ in sockets]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing():
        pytest.skip(missing())
    started = Cluster(tmp_path_factory.mktemp("slurm"))
    started.start()
    yield started
    started.stop()


class Submitter:
    def __init__(self, cluster: Cluster, clone: Path) -> None:
        self.cluster, self.clone = cluster, clone
        # The virtual nodes are one machine, whose resolver does not know their names.
        self.variables = {"PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "NEOX_SITE": "", "OMP_NUM_THREADS": "1"}

    def submit(self, *words: str, **variables: str) -> str:
        """sbatch's words; the job's number."""
        return self.cluster.run(
            "sbatch", "--parsable", *words, cwd=self.clone, **{**self.variables, **variables}
        ).strip()  # fmt: skip

    def python(self, *words: object, site: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a program in the clone."""
        env = {**self.cluster.environment, **self.variables, "NEOX_SITE": site, "PYTHONPATH": str(self.clone)}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=self.clone, env=env, capture_output=True, text=True, timeout=300)

    def record(self, job: str) -> str:
        """Returns Slurm's record of a job."""
        return self.cluster.run("scontrol", "show", "job", job)

    def state(self, job: str) -> str:
        return self.record(job).partition("JobState=")[2].split()[0]

    def log(self, job: str, name: str = "neox-training") -> str:
        path = self.clone / "logs" / f"{name}-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, job: str, until: Callable[[], bool] | None = None, name: str = "neox-training") -> str:
        """The log of a job when it has ended, or when `until` holds."""
        is_over = until or (lambda: self.state(job) in END_STATES)
        wait_for(is_over, WAIT_S, lambda: f"{self.state(job)}\n{self.log(job, name)}")
        return self.log(job, name)

    def completed(self, job: str, name: str = "neox-training") -> str:
        """The log of a job that ends well."""
        log = self.wait(job, name=name)
        assert self.state(job) == "COMPLETED", log
        return log


@pytest.fixture(scope="session")
def slurm(cluster: Cluster, clone: Path) -> Submitter:
    return Submitter(cluster, clone)


@pytest.fixture(scope="session")
def accounted(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitter]:
    if missing(accounting=True):
        pytest.skip(missing(accounting=True))
    started = Cluster(tmp_path_factory.mktemp("accounted"), accounting=True)
    started.start()
    yield Submitter(started, clone)
    started.stop()


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = tmp_path_factory.mktemp("home") / "neox"
    file_list = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", ":!tests"],
                            cwd=ROOT, capture_output=True, text=True, check=True).stdout  # fmt: skip
    for name in filter(None, file_list.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, clone / name, follow_symlinks=False)
    return clone


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "model.yml", **keys: Any) -> Path:
        usual = {"save": str(tmp_path / "save"), "train_iters": 6, "checkpoint_factor": 1000}
        (tmp_path / name).write_text(yaml.safe_dump(config(LLAMA, ADAMW, usual, keys)))
        return tmp_path / name

    return write


def losses(save: Path) -> list[float]:
    """train/lm_loss of every iteration; the last word counts where one was run twice."""
    losses = {row["iteration"]: row["train/lm_loss"] for row in metric_rows(save) if row["iteration"]}
    return [losses[iteration] for iteration in sorted(losses)]
