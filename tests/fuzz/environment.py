"""Environment variables of launchers, clusters and people: ranks, machines, containers."""

import json
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.launch import process_info
from megatron.launch.container import read_container
from megatron.launch.plan import plan
from megatron.launch.site import site_nodes
from megatron.launch.slurm import job_port, step_node, tasks_asked_for
from megatron.launch.submit import has_nodes_option
from megatron.neox_arguments import NeoXArgs, load
from tests.fuzz.campaign import Kind
from tests.fuzz.cases import Case
from tests.fuzz.mutations import spoilt_bytes, texts
from tests.launch.test_environment import HYDRA, MPI, MVAPICH, POD, SLURM, TORCHRUN

_FURTHER = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2,7],m1", "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "GPUS": "0,1",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_RESTART_COUNT": "1",
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "n0",
    "PET_MASTER_PORT": "1234", "MAIN_NODE_IP": "127.0.0.1", "TOTAL_GPUS": "8", "CUDA_VISIBLE_DEVICES": "0,1",
    "NEOX_RESTARTS": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29501", "NEOX_CONTAINER": "/image.sqsh",
    "NEOX_CONTAINER_RUNTIME": "enroot", "NEOX_SITE": "example", "NEOX_NODES": "4", "SLURM_GPUS_PER_NODE": "4",
    "SLURM_STEP_GPUS": "0-3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip
_HOSTS = b"localhost slots=4\n# comment\nhost-b slots=2\n"
_WORLDS = ({}, TORCHRUN, SLURM, MPI, MVAPICH, HYDRA, POD, POD | {"LOCAL_RANK": "0"})
_TEXTS = texts.map(lambda text: text.replace("\0", "").encode(errors="surrogatepass").decode(errors="surrogateescape"))


@st.composite
def _cases(draw: DrawFn) -> Case:
    env = dict(draw(st.sampled_from(_WORLDS)))
    for name in draw(st.lists(st.sampled_from(sorted(_FURTHER)), max_size=4)):
        env[name] = _FURTHER[name]
    for name in draw(st.lists(st.sampled_from(sorted(env) or ["RANK"]), min_size=1, max_size=3)):
        if draw(st.integers(0, 4)):
            env[name] = draw(_TEXTS)
        else:
            env.pop(name, None)
    reader = draw(st.sampled_from(["rank", "container", "launcher", "launcher", "launcher", "slurm", "submit"]))
    hosts = draw(st.one_of(spoilt_bytes(_HOSTS), st.just(_HOSTS))) if draw(st.integers(0, 3)) == 0 else None
    files = {} if hosts is None else {"hosts": hosts}
    return {f"{reader}.json": json.dumps(env).encode(), **files}


@cache
def _args() -> NeoXArgs:
    return load([Path(__file__).parents[2] / "configs" / f"{name}.yml" for name in ("quickstart", "local_setup")])


def _run(folder: Path) -> None:
    (file,) = folder.glob("*.json")
    env = json.loads(file.read_bytes())
    if (folder / "hosts").exists():
        env["DLTS_HOSTFILE"] = str(folder / "hosts")
    match file.stem:
        case "rank":
            process_info(env)
        case "container":
            read_container(env)
            site_nodes(True, (), env)
        case "launcher":
            plan("train.py", _args(), env=env)
        case "slurm":  # parts of the launcher that need no Slurm
            tasks_asked_for(env)
            job_port(env)
            step_node(env, started_by_us=True)
        case "submit":
            has_nodes_option(env)


KIND = Kind("environment", _cases(), _run)
