"""Rank, world and rendezvous of this process, read from the environment its starter left; and where its files
are."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.neox_arguments.errors import UserError

DEFAULT_PORT = 29500
_GROUP = re.compile(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]")  # of numbers in a node list
# Rank, world, rank and ranks on this machine: OpenMPI, MVAPICH, and what Hydra (MPICH, Intel MPI) sets.
_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class LaunchError(UserError, ValueError):
    """Ranks cannot be started, or this process cannot tell which rank it is."""


@dataclass(frozen=True)
class ProcessInfo:
    """One rank's place in the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    starter: str  # "torchrun", "operator" (of Kubernetes), "slurm", "mpi" or "alone"
    # Whether all ranks are known to be on this machine; the same on each of them
    on_one_machine: bool = field(default=False, compare=False)

    def variables(self) -> dict[str, str]:
        """The variables torch.distributed's env:// reads, for starters that set others."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def process_info(
    env: Mapping[str, str] | None = None, master_addr: str | None = None, master_port: int | None = None
) -> ProcessInfo:
    """This process's place: from RANK and WORLD_SIZE (deepy.py, torchrun, Kubernetes operators), a Slurm
    step, OpenMPI, MVAPICH or MPICH, or alone.

    `master_addr` and `master_port` are used where the environment names none. Raises LaunchError when the
    variables are incomplete or contradict each other.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        info = _from_torchrun(env, master_addr, master_port)
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        # Only a step started by srun: a batch script sees SLURM_PROCID=0 and SLURM_NTASKS=N too, but is one
        # process.
        info = _from_slurm(env, master_addr, master_port)
    elif mpi_names := next((names for names in _MPI if names[0] in env), None):
        info = _from_mpi(env, mpi_names, master_addr, master_port)
    else:
        info = ProcessInfo(0, 1, 0, 1, *_rendezvous(env, master_addr, master_port), "alone", True)
    if not 0 <= info.rank < info.world_size:
        raise LaunchError(f"rank {info.rank} is outside a world of {info.world_size} ({info.starter} environment)")
    if not 0 <= info.local_rank < info.local_world_size:
        raise LaunchError(
            f"local rank {info.local_rank} is outside this machine's {info.local_world_size} ranks "
            f"({info.starter} environment)"
        )
    return info


def install_root() -> Path:
    """The folder of deepy.py, train.py, `tools/`, `configs/` and `slurm/`: a clone's own, else `neox/` beside
    an installed `megatron/`, where setup.py puts them."""
    above = Path(__file__).resolve().parents[2]
    return above if (above / "deepy.py").is_file() else above / "neox"


def port_of(value: int | str) -> int:
    """The port of MASTER_PORT. Raises LaunchError for what is none."""
    if not str(value).isdecimal() or not 0 < int(value) < 65536:
        raise LaunchError(f"MASTER_PORT={value!r} in the environment is not a port number")
    return int(value)


def whole_number(env: Mapping[str, str], name: str) -> int:
    """The number that a variable says. Raises LaunchError for what is none."""
    if not env[name].isdecimal():
        raise LaunchError(f"{name}={env[name]!r} in the environment is not a whole number")
    return int(env[name])


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list, by Slurm's own answer where there is one: `n[003-007],m1` -> `n003`.

    Raises LaunchError for what is none.
    """
    if "[" in nodelist and shutil.which("scontrol") is not None:
        words = ["scontrol", "show", "hostnames", nodelist.strip()]  # it expands the text, and asks no daemon
        with suppress(OSError, subprocess.SubprocessError):
            hosts = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.split()
            if hosts:
                return hosts[0]
    return first_of_list(nodelist)


def first_of_list(nodelist: str) -> str:
    """First host of a node list, in the grammar of Slurm and python-hostlist: commas between hosts, any
    number of groups `[1-3,7]` in each. Raises LaunchError for what is none."""
    first = re.match(r"(?:[^\[\],\s]|\[[^\[\]]*\])+(?=,|$)", nodelist.strip())
    host = _GROUP.sub(r"\1", first[0]) if first is not None else "["
    if "[" in host:
        raise LaunchError(
            f"cannot read the node list {nodelist!r} of SLURM_JOB_NODELIST; set MASTER_ADDR to its first host"
        )
    return host


def _from_torchrun(env: Mapping[str, str], addr: str | None, port: int | None) -> ProcessInfo:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "LOCAL_RANK" not in env and "PET_NPROC_PER_NODE" in env:
        # An operator of Kubernetes, which counts pods: this process is the only one of its pod.
        ranks_of_pod = env["PET_NPROC_PER_NODE"]
        if ranks_of_pod not in ("1", "auto", "gpu", "cpu"):
            raise LaunchError(f"PET_NPROC_PER_NODE is {ranks_of_pod}: start the pod's ranks with deepy.py or torchrun")
        return ProcessInfo(rank, world, 0, 1, *_rendezvous(env, addr, port), starter="operator")
    local_rank = _number(env, "LOCAL_RANK", rank if world == 1 else None)
    local_world = _number(env, "LOCAL_WORLD_SIZE", local_rank + 1)
    here = world == 1 or ("LOCAL_WORLD_SIZE" in env and local_world == world)
    if "MASTER_ADDR" not in env and addr is None and world > 1:
        raise LaunchError("WORLD_SIZE is set but MASTER_ADDR is not; set it to the address of rank 0's machine")
    return ProcessInfo(rank, world, local_rank, local_world, *_rendezvous(env, addr, port), "torchrun", here)


def _from_slurm(env: Mapping[str, str], addr: str | None, port: int | None) -> ProcessInfo:
    world = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    local_rank = _number(env, "SLURM_LOCALID", 0)
    tasks_here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_world = max(int(tasks_here.group()) if tasks_here else 1, local_rank + 1)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    one_node = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1)) == 1
    if addr is None:
        addr = "127.0.0.1" if one_node or not hosts else first_host(hosts)
    if port is None:
        # Jobs that share a node must not share a port.
        port = DEFAULT_PORT + _number(env, "SLURM_JOB_ID", 0) % 1000
    rank = _number(env, "SLURM_PROCID")
    return ProcessInfo(rank, world, local_rank, local_world, *_rendezvous(env, addr, port), "slurm", one_node)


def _from_mpi(env: Mapping[str, str], names: tuple[str, ...], addr: str | None, port: int | None) -> ProcessInfo:
    rank, world, local_rank = (_number(env, name) for name in names[:3])
    local_world = _number(env, names[3], local_rank + 1)
    if addr is None and "MASTER_ADDR" not in env and local_world < world:
        raise LaunchError(
            "mpirun started ranks on several machines; pass the address of rank 0's machine: mpirun -x MASTER_ADDR=..."
        )
    here = world == 1 or (names[3] in env and local_world == world)
    return ProcessInfo(rank, world, local_rank, local_world, *_rendezvous(env, addr, port), "mpi", here)


def _rendezvous(env: Mapping[str, str], addr: str | None, port: int | None) -> tuple[str, int]:
    default = DEFAULT_PORT if port is None else port
    return env.get("MASTER_ADDR", addr or "127.0.0.1"), _number(env, "MASTER_PORT", default)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env:
        if default is None:
            raise LaunchError(f"the environment does not name {name}; it is needed beside the other rank variables")
        return default
    try:
        return int(env[name])
    except ValueError:
        raise LaunchError(f"{name}={env[name]!r} in the environment is not a whole number") from None
