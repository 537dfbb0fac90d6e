"""Reads this process's rank, world size and rendezvous address from its environment; finds the scripts."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.values.integers import parse_integer

DEFAULT_PORT = 29500
MOST_NODES = 1_000_000  # more are a mistake, and would fill the memory
ONE_PER_GPU = ("auto", "gpu", "cpu")  # values of PET_NPROC_PER_NODE that are not numbers
_GROUP = re.compile(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]")  # numbers in a Slurm node list
# Variables of rank, world size, local rank and local world size: OpenMPI, MVAPICH, Hydra (MPICH, Intel MPI)
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class LaunchError(UserError, ValueError):
    """Raised if ranks cannot be started, or if this process cannot tell which rank it is."""


@dataclass(frozen=True)
class ProcessInfo:
    """The rank of this process, the world size, and the address and port at which all ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    starter: str  # "torchrun", "operator" (of Kubernetes), "slurm", "mpi" or "alone"
    # Whether all ranks are known to be on this machine; equal on all ranks
    on_one_machine: bool = field(default=False, compare=False)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that torch.distributed (env://) reads, such as RANK.

        Slurm and MPI set variables with other names.
        """
        names = ("rank", "world_size", "local_rank", "local_world_size", "master_addr", "master_port")
        return {name.upper(): str(getattr(self, name)) for name in names}


def process_info(
    env: Mapping[str, str] | None = None, master_addr: str | None = None, master_port: int | None = None
) -> ProcessInfo:
    """Returns the rank and world size of this process, with the address and port at which ranks meet.

    They are read from RANK and WORLD_SIZE (deepy.py, torchrun, Kubernetes operators), else from a Slurm step,
    else from OpenMPI, MVAPICH or MPICH. Without such variables the process is the only rank.

    `master_addr` and `master_port` are used if the environment names no address or port. Raises LaunchError
    if the variables are incomplete or contradict each other.
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
        raise LaunchError(
            f"rank {info.rank} is not below world size {info.world_size} ({info.starter} environment); correct these "
            "environment variables"
        )
    if not 0 <= info.local_rank < info.local_world_size:
        raise LaunchError(
            f"local rank {info.local_rank} is not below the number of ranks on this machine, {info.local_world_size} "
            f"({info.starter} environment); correct these environment variables"
        )
    return info


def install_root() -> Path:
    """Returns the folder that contains deepy.py, train.py, `tools/`, `configs/` and `slurm/`.

    It is the root of a clone, or `neox/` beside an installed `megatron/`.
    """
    root = Path(__file__).resolve().parents[2]
    return root if (root / "deepy.py").is_file() else root / "neox"


def port_of(value: int | str, name: str = "MASTER_PORT") -> int:
    """Returns `value`, which the environment variable `name` has, as a port number. Raises LaunchError if it
    is not one."""
    number = parse_integer(str(value).strip())
    if number is None or not 0 < number < 65536:
        raise LaunchError(f"{name}={value!r} in the environment is not a port number (1 to 65535); correct or unset it")
    return number


def read_integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns the value of an environment variable as an integer. Raises LaunchError if it is not a whole
    number.

    default: the value if the variable is unset or empty; None: it must be set.
    """
    text = env.get(name, "")
    if not text and default is not None:
        return default
    number = parse_integer(text.strip())
    if number is None:
        raise LaunchError(f"{name}={text[:100]!r} in the environment is not a whole number; correct or unset it")
    return number


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list: `n[003-007],m1` gives `n003`. Uses `scontrol` if it is
    installed.

    Raises LaunchError for text that is not a node list.
    """
    if "[" in nodelist and shutil.which("scontrol") is not None:
        words = ["scontrol", "show", "hostnames", nodelist.strip()]  # it expands the text, and asks no daemon
        with suppress(OSError, subprocess.SubprocessError):
            hosts = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.split()
            if hosts:
                return hosts[0]
    return first_of_list(nodelist)


def first_of_list(nodelist: str) -> str:
    """Returns the first host of a node list in the syntax of Slurm and python-hostlist: `n[1-3,7],m1` gives
    `n1`.

    Hosts are separated by commas, and each may contain several groups such as `[1-3,7]`. Raises LaunchError
    for any other text.
    """
    host_match = re.match(r"(?:[^\[\],\s]|\[[^\[\]]*\])+(?=,|$)", nodelist.strip())
    host = _GROUP.sub(r"\1", host_match[0]) if host_match is not None else "["
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
        if ranks_of_pod not in ("1", *ONE_PER_GPU):
            raise LaunchError(
                f"PET_NPROC_PER_NODE={ranks_of_pod} asks for several ranks in this pod, but this script is only one; "
                "start it with deepy.py or torchrun"
            )
        return ProcessInfo(rank, world, 0, 1, *_rendezvous(env, addr, port), starter="operator")
    local_rank = _number(env, "LOCAL_RANK", rank if world == 1 else None)
    local_world = _number(env, "LOCAL_WORLD_SIZE", local_rank + 1)
    one_node = world == 1 or ("LOCAL_WORLD_SIZE" in env and local_world == world)
    if "MASTER_ADDR" not in env and addr is None and world > 1:
        raise LaunchError(
            "WORLD_SIZE is set but MASTER_ADDR is not; set MASTER_ADDR to the address of rank 0's machine"
        )
    return ProcessInfo(rank, world, local_rank, local_world, *_rendezvous(env, addr, port), "torchrun", one_node)


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
            "mpirun started ranks on several machines, but MASTER_ADDR is not set; pass the address of rank 0's "
            "machine: mpirun -x MASTER_ADDR=..."
        )
    one_node = world == 1 or (names[3] in env and local_world == world)
    return ProcessInfo(rank, world, local_rank, local_world, *_rendezvous(env, addr, port), "mpi", one_node)


def _rendezvous(env: Mapping[str, str], addr: str | None, port: int | None) -> tuple[str, int]:
    default = DEFAULT_PORT if port is None else port
    return env.get("MASTER_ADDR", addr or "127.0.0.1"), _number(env, "MASTER_PORT", default)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env:
        if default is None:
            raise LaunchError(f"the environment sets other rank variables but not {name}; set all of them or none")
        return default
    return read_integer(env, name)
