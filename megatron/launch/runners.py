"""Builds the command lines of programs that start ranks.

These programs are DeepSpeed's pdsh, OpenMPI and MVAPICH runners, and torchrun. The function of each takes a
Run, has no side effects, and returns the command and the environment variables to add.
"""

import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.launch.environment import LaunchError, install_root
from megatron.launch.hosts import Node
from megatron.launch.run import Run, write_text
from megatron.neox_arguments.optional_packages import import_optional
from megatron.neox_arguments.validation.deepspeed_versions import MISSING

_INSTALL = {
    "pdsh": ("pdsh", "apt install pdsh"),
    "openmpi": ("mpirun", "apt install openmpi-bin"),
    "mvapich": ("mpiname", "load the cluster's MVAPICH2-GDR module"),
    "slurm": ("srun", "start deepy.py on a machine with Slurm"),
    "torchrun": ("torchrun", "pip install torch"),
}


def check_starter(run: Run) -> None:
    """Raises LaunchError when the program that starts the run is not on PATH."""
    program, advice = _INSTALL[run.launcher]
    if run.launcher != "torchrun" and shutil.which(program) is None:
        raise LaunchError(
            f"launcher: {run.launcher} needs {program}, which is not on PATH; {advice}, or name another launcher"
        )


def pdsh(run: Run) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts deepy.py on every host over ssh, and its environment variables.

    pdsh replaces %n by the index of the host, which becomes its node_rank.
    """
    runner = _deepspeed("PDSHRunner")(_deepspeed_args(run, ""), world_info_base64="")
    runner.exports = {name: _remote(value) for name, value in run.environment.items()}
    words, _, env = runner.get_cmd({}, dict.fromkeys(node.host for node in run.nodes))
    # DeepSpeed's own launcher on each host keeps no logs and tells the other hosts nothing: ours is put in
    # its place.
    words = words[: words.index("-u")]
    flags = ["--hosts", *map(str, run.nodes), "--node_rank", "%n"]
    flags += ["--master_addr", run.master_addr, "--master_port", str(run.master_port)]
    launcher_command = ["-u", str(install_root() / "deepy.py"), *flags, *run.command[2:]]
    return [*words, *(word if word == "%n" else _remote(word) for word in launcher_command)], env


def openmpi(run: Run) -> tuple[list[str], dict[str, str]]:
    """Returns the mpirun command that starts all ranks, and its environment variables.

    mpirun reads the slots from a new hostfile, in which include and exclude are already applied.
    """
    _first_slots(run)
    # mpirun would bind each rank to one core, and its data workers with it.
    return _mpi_command(run, "OpenMPIRunner", "--bind-to none")


def mvapich(run: Run) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts all ranks under MVAPICH's mpirun, and its environment variables.

    Raises LaunchError if hosts have different numbers of ranks.
    """
    _first_slots(run)
    if len({node.ranks for node in run.nodes}) > 1:
        ranks_of_hosts = ", ".join(f"{node.host}: {node.ranks}" for node in run.nodes)
        raise LaunchError(
            f"launcher: mvapich needs equally many ranks on every host, found {ranks_of_hosts}; set num_gpus to a "
            "number that every host has"
        )
    try:
        return _mpi_command(run, "MVAPICHRunner")
    except OSError as problem:  # it writes a hostfile to a fixed place
        if problem.filename is None:  # an import failed
            raise
        raise LaunchError(
            f"launcher: mvapich: its hostfile {problem.filename} cannot be written ({problem.strerror}); remove that "
            "file, or name another launcher"
        ) from None


def torchrun(run: Run) -> tuple[list[str], dict[str, str]]:
    """Returns the torchrun command that starts this machine's ranks, and its environment variables.

    For several machines it also has --nnodes, --node-rank, --master-addr and --master-port.
    """
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={run.node.ranks}"]
    if len(run.nodes) == 1:
        words += ["--standalone"]
    else:
        words += [f"--nnodes={len(run.nodes)}", f"--node-rank={run.node_rank}"]
        words += [f"--master-addr={run.master_addr}", f"--master-port={run.master_port}"]
    if run.args.max_restarts:
        words += [f"--max-restarts={run.args.max_restarts}"]
    env = {"CUDA_VISIBLE_DEVICES": ",".join(run.node.devices)} if run.node.devices else {}
    return [*words, *run.command[2:]], env


def manual_node_lines(
    nodes: Sequence[Node], words: Sequence[str], master_addr: str, master_port: int
) -> list[tuple[str, str]]:
    """Returns (host, command line to type there) for every machine.

    words: the script, its configuration files and all further arguments.
    """
    in_clone = (install_root() / "megatron").is_dir()  # if not, the line may be typed in any folder
    deepy = "deepy.py" if in_clone else str(install_root() / "deepy.py")
    lines = []
    for rank, node in enumerate(nodes):
        flags = ["--num_nodes", str(len(nodes)), "--node_rank", str(rank)]
        flags += ["--master_addr", master_addr, "--master_port", str(master_port)]
        if node.devices:
            flags += ["--include", node.include() or ""]
        elif node.ranks is not None:
            flags += ["--num_gpus", str(node.ranks)]
        lines.append((node.host, shlex.join(["python", deepy, *flags, *words])))
    return lines


def write_hostfile(run: Run) -> None:
    """Writes mpirun's hostfile, with the run's hosts and slots. Raises LaunchError if it cannot be
    written."""
    write_text(Path(_hostfile_path(run)), "".join(f"{node.host} slots={node.ranks}\n" for node in run.nodes))


def _hostfile_path(run: Run) -> str:
    """Returns the path of mpirun's hostfile, next to the file of arguments."""
    return f"{run.args_file.with_suffix('')}.hosts"


def _deepspeed(name: str) -> Any:
    """Returns a class of DeepSpeed's launcher/multinode_runner.py by its name.

    Raises LaunchError if DeepSpeed is not installed.
    """
    was_set = "DS_ACCELERATOR" in os.environ
    # With this variable DeepSpeed neither searches for accelerators nor warns that it found none. Ranks
    # detect their own accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        missing = LaunchError(f"the launchers pdsh, openmpi and mvapich need {MISSING}")
        return getattr(import_optional("deepspeed.launcher.multinode_runner", missing), name)
    finally:
        if not was_set:
            del os.environ["DS_ACCELERATOR"]


def _deepspeed_args(run: Run, script: str, *words: str, options: str = "") -> Namespace:
    """Returns the command line of DeepSpeed's launcher in parsed form, which its runner classes read.

    words: arguments of the script.
    options: further options of mpirun.
    """
    return Namespace(
        user_script=script, user_args=list(words), launcher_args=options, hostfile=_hostfile_path(run), include="",
        exclude="", num_nodes=-1, num_gpus=-1, master_addr=run.master_addr, master_port=run.master_port, ssh_port=None,
        venv_script=None, no_python=False, module=False, no_local_rank=True, save_pid=False, enable_each_rank_log=None,
    )  # fmt: skip


def _mpi_command(run: Run, runner_class: str, options: str = "") -> tuple[list[str], dict[str, str]]:
    """Returns the command of one of DeepSpeed's MPI runners, and its environment variables.

    runner_class: name of the runner's class.
    options: further options of mpirun.
    """
    pool = {node.host: node.ranks or 0 for node in run.nodes}
    runner = _deepspeed(runner_class)(_deepspeed_args(run, *run.command[2:], options=options), "", pool)
    # Not quoted: these words do not pass through a shell
    runner.exports |= {**run.environment, "MASTER_ADDR": run.master_addr, "MASTER_PORT": str(run.master_port)}
    return runner.get_cmd({}, pool), {}


def _first_slots(run: Run) -> None:
    """Raises LaunchError if a machine shall not use its first GPUs, because MPI always uses the first slots
    of a host."""
    for node in run.nodes:
        if node.devices:
            raise LaunchError(
                f"launcher: {run.launcher} always uses the first slots of a host, so it cannot use {node}; exclude "
                "only whole hosts, or set launcher: pdsh"
            )


def _remote(text: str) -> str:
    """Quotes a word for the shell of another machine, and escapes % because pdsh replaces %h, %n and %u."""
    return shlex.quote(text).replace("%", "%%")
