"""Rank and rendezvous as torchrun, Slurm, OpenMPI or nobody leave them; what a rank sets for libraries."""

import os
import socket
import sys

import pytest

from megatron.launch import enter, process_info
from megatron.launch.devices import interface_to
from megatron.launch.environment import LaunchError, ProcessInfo, first_host, first_of_list
from megatron.launch.slurm import step_node, task_counts, tasks_asked_for
from megatron.neox_arguments import NeoXArgs
from tests.model.stages import small
from tests.training.runs import BASE


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


TORCHRUN = variables("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n0 MASTER_PORT=1234")
BATCH = variables("SLURM_JOB_ID=4021 SLURM_PROCID=0 SLURM_LOCALID=2 SLURM_NTASKS=8")
SLURM = BATCH | variables(  # as srun --nodes 2 --ntasks-per-node 4 sets them
    "SLURM_PROCID=6 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=4(x2) "
    "SLURM_STEP_NODELIST=nid[001007-001008]"
)
MPI = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
MVAPICH = {name.replace("OMPI_", "MV2_"): value for name, value in MPI.items()}
HYDRA = variables("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
POD = variables("WORLD_SIZE=4 RANK=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456")  # row 54 of the commands
N0 = {"MASTER_ADDR": "n0"}


@pytest.mark.parametrize(("env", "place"), [
    ({}, (0, 1, 0, 1, "127.0.0.1", 29500, "alone")),
    (TORCHRUN, (5, 8, 1, 4, "n0", 1234, "torchrun")),
    (SLURM, (6, 8, 2, 4, "nid001007", 29500 + 21, "slurm")),
    (BATCH, (0, 1, 0, 1, "127.0.0.1", 29500, "alone")),  # a batch script is one process
    ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, 1, 4, "127.0.0.1", 29500, "mpi")),
    *((mpi | N0, (3, 4, 1, 2, "n0", 29500, "mpi")) for mpi in (MPI, MVAPICH, HYDRA)),
    (POD | {"LOCAL_RANK": "0"}, (2, 4, 0, 1, "job-master-0", 23456, "torchrun")),
    (POD | {"PET_NPROC_PER_NODE": "auto"}, (2, 4, 0, 1, "job-master-0", 23456, "operator")),
])  # fmt: skip
def test_places(env, place):
    info = process_info(env)
    assert info == ProcessInfo(*place)
    assert place[6] != "torchrun" or process_info(info.variables()) == info


def test_slurm_step_with_a_given_rendezvous():
    info = process_info({**SLURM, "MASTER_ADDR": "10.0.0.1"}, master_port=40000)
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 40000)


def drop_variable(name: str) -> dict[str, str]:
    return {key: value for key, value in TORCHRUN.items() if key != name}


@pytest.mark.parametrize(("env", "message"), [
    (MPI, "mpirun -x MASTER_ADDR"),
    (POD | {"PET_NPROC_PER_NODE": "2"}, "PET_NPROC_PER_NODE=2 "),
    *((drop_variable(name), f"but not {name};") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    (drop_variable("MASTER_ADDR"), "MASTER_ADDR is not"),
    (TORCHRUN | {"RANK": "8"}, "rank 8 .* 8"),
    (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 "),
    (TORCHRUN | {"RANK": "first"}, "RANK='first'"),
])  # fmt: skip
def test_what_is_missing_or_contradictory_is_named(env, message):
    with pytest.raises(LaunchError, match=message):
        process_info(env)


@pytest.mark.parametrize("name", ["SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"])
def test_task_counts(name):
    assert task_counts({name: "4(x2),1"}, name) == (4, 4, 1) and task_counts({}, name) == (1,)
    read = tasks_asked_for if name == "SLURM_TASKS_PER_NODE" else lambda env: step_node(env, True)
    with pytest.raises(LaunchError, match=f"^{name}='four'"):
        read({"SLURM_STEP_ID": "0", name: "four"})


@pytest.mark.parametrize(("nodes", "expected"), [
    ("n1", "n1"),
    ("n1,n2", "n1"),
    ("nid[003-007,9],m1", "nid003"),
    ("nid[3,9]", "nid3"),
    ("rack[1-2]-gpu,login", "rack1-gpu"),
    ("node-12.cluster.org", "node-12.cluster.org"),
    ("foo-[10-11]-[01-02]", "foo-10-01"),
    ("r1i[0-1]n[0-1],r2i0n0", "r1i0n0"),
    ("rack[0-63]_blade[0-41]", "rack0_blade0"),  # of slurm.conf's manual
    ("c[01,03]s[2]n[007-009].site", "c01s2n007.site"),
])  # fmt: skip
def test_first_host(nodes, expected):
    assert first_of_list(nodes) == first_host(nodes) == expected


@pytest.mark.parametrize("nodes", ["", ",n1", "n[1-2", "n1-2]", "n[]", "n[a-c]", "bgl[000x133]", "n[[1-2]]", "n1 n2"])
def test_what_is_no_node_list(nodes):
    with pytest.raises(LaunchError, match=r"SLURM_JOB_NODELIST.*MASTER_ADDR"):
        first_of_list(nodes)


def test_slurms_own_answer_comes_first(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text('#!/bin/sh\ntest "$3" = "bgl[000x133]" && printf "bgl000\nbgl001\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert first_host("bgl[000x133]") == "bgl000"
    assert first_host("n[3-4]") == "n3", "where it fails"


def test_entering_sets_what_torch_reads(monkeypatch):
    """A default port does not win over the job's own."""
    monkeypatch.setattr(os, "environ", {**MPI, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"})
    info = enter(NeoXArgs.from_dict(BASE))
    assert (info.rank, info.world_size, info.master_port) == (3, 4, 4711)
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")] == ["3", "4", "4711"]


@pytest.mark.parametrize("backend, env, expected", [
    ("nccl", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ("nccl", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ("gloo", {}, {}),
])  # fmt: skip
def test_gpu_memory_is_in_segments_that_grow(backend: str, env: dict[str, str], expected: dict[str, str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(os, "environ", env)
    enter(small(distributed_backend=backend))
    assert {name: value for name, value in env.items() if "ALLOC" in name} == expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo is left alone")
def test_gloo_takes_the_interface_that_leads_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines with GPUs too, for objects and CPU tensors. What the user has set stays."""
    host_address = next(
        address for _, _, _, _, (address, *_) in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)
    )

    def interface(world_size: int, local_world_size: int, configured: str | None = None) -> str | None:
        sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local_world_size)}
        env = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": host_address, "MASTER_PORT": "29500", **sizes}
        monkeypatch.setattr(os, "environ", env | ({"GLOO_SOCKET_IFNAME": configured} if configured is not None else {}))
        enter(small(distributed_backend="nccl"))
        return os.environ.get("GLOO_SOCKET_IFNAME")

    assert interface(1, 1) == interface(4, 4) == "lo"
    assert interface(8, 4) == interface_to(host_address) is not None
    assert interface(8, 4, "hsn0") == "hsn0"
