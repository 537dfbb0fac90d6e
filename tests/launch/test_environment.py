"""Rank and rendezvous as torchrun, Slurm, OpenMPI or nobody leave them in the environment."""

import os

import pytest

from megatron.launch import process_info
from megatron.launch.environment import LaunchError, ProcessInfo, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "1234",
}
# As srun --nodes 2 --ntasks-per-node 4 sets them.
SLURM = {
    "SLURM_JOB_ID": "4021",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "nid[001007-001008]",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_alone():
    assert process_info({}) == ProcessInfo(0, 1, 0, 1, "127.0.0.1", 29500, "alone")


def test_torchrun():
    assert process_info(TORCHRUN) == ProcessInfo(5, 8, 1, 4, "n0", 1234, "torchrun")


def test_variables_are_read_back():
    info = process_info(TORCHRUN)
    assert process_info(info.variables()) == info


def test_slurm_step():
    assert process_info(SLURM) == ProcessInfo(6, 8, 2, 4, "nid001007", 29500 + 21, "slurm")


def test_slurm_step_with_a_given_rendezvous():
    info = process_info({**SLURM, "MASTER_ADDR": "10.0.0.1"}, master_port=40000)
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 40000)


def test_a_slurm_batch_script_is_one_process():
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert process_info({**batch, "SLURM_PROCID": "0"}).world_size == 1


def test_mpi_on_one_machine_and_on_two():
    here = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert process_info(here) == ProcessInfo(3, 4, 1, 4, "127.0.0.1", 29500, "mpi")
    with pytest.raises(LaunchError, match="mpirun -x MASTER_ADDR"):
        process_info(MPI)
    assert process_info({**MPI, "MASTER_ADDR": "n0"}).master_addr == "n0"


def test_other_mpis():
    mvapich = {name.replace("OMPI_", "MV2_"): value for name, value in MPI.items()}
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for env in (mvapich, hydra):
        assert process_info({**env, "MASTER_ADDR": "n0"}) == ProcessInfo(3, 4, 1, 2, "n0", 29500, "mpi")


def test_one_process_a_pod():
    """Row 54 of the commands, with LOCAL_RANK; and as operators of Kubernetes set it, without."""
    pod = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    place = (2, 4, 0, 1, "job-master-0", 23456)
    assert process_info({**pod, "LOCAL_RANK": "0"}) == ProcessInfo(*place, "torchrun")
    assert process_info({**pod, "PET_NPROC_PER_NODE": "auto"}) == ProcessInfo(*place, "operator")
    with pytest.raises(LaunchError, match="PET_NPROC_PER_NODE is 2: start the pod's ranks with deepy.py"):
        process_info({**pod, "PET_NPROC_PER_NODE": "2"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "does not name RANK"),
        ({"WORLD_SIZE": None}, "does not name WORLD_SIZE"),
        ({"LOCAL_RANK": None}, "does not name LOCAL_RANK"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        ({"RANK": "8"}, "rank 8 is outside a world of 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 is outside"),
        ({"RANK": "first"}, "RANK='first' in the environment is not a whole number"),
    ],
)
def test_incomplete_or_contradictory(change, message):
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(LaunchError, match=message):
        process_info(env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("nid[003-007,9],m1", "nid003"),
        ("nid[3,9]", "nid3"),
        ("rack[1-2]-gpu,login", "rack1-gpu"),
        ("node-12.cluster.org", "node-12.cluster.org"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_entering_sets_what_torch_reads(monkeypatch):
    """A default port does not win over the job's own."""
    from megatron.launch import enter
    from megatron.neox_arguments import NeoXArgs
    from tests.training.runs import BASE

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    info = enter(NeoXArgs.from_dict(BASE))
    assert (info.rank, info.world_size, info.master_port) == (3, 4, 4711)
    assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")} == {
        "RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "4711"
    }  # fmt: skip
