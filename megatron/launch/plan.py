"""Make the description of a run from its configuration, the environment and what was typed."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.launch.devices import choose_ranks, cores, is_this_machine, visible_gpus
from megatron.launch.environment import DEFAULT_PORT, LaunchError
from megatron.launch.hosts import Node, carried, hosts_of
from megatron.launch.manual_nodes import ManualNode, find_manual_node
from megatron.launch.run import Run, log_dir_of
from megatron.launch.slurm import allocation, check_gpus, has_slurm, job_port, step_node
from megatron.launch.typed_variables import check_world, choose_local_ranks, main_node_among, total_ranks
from megatron.neox_arguments.compat.methods import ARGS_FLAG

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def plan(
    script: str | Path,
    args: "NeoXArgs",
    script_args: Sequence[str] = (),
    node_rank: int | None = None,
    hosts: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    args_file: Path | None = None,
) -> Run:
    """How `script` is to be started as `args`, the environment and the flags `--node_rank` and `--hosts` say;
    nothing is written and nothing started. args_file: that of an earlier start.

    Raises LaunchError for machines and GPUs that are not there or contradict each other, ConfigError for a
    layout that does not fit their number.
    """
    env = os.environ if env is None else env
    script = Path(script)
    args_file = args_file or log_dir_of(args) / _name_of_args_file(script)
    # -u: a log line must reach the log when it is printed, not when a buffer is full
    command = (sys.executable, "-u", str(script), ARGS_FLAG, str(args_file), *script_args)
    port = None if args.origin("master_port") == "default" else args.master_port
    run = Run(
        "local", command, (), log_dir_of(args), args, args_file,
        master_addr=args.master_addr or "127.0.0.1", master_port=port, total_ranks=total_ranks(env),
    )  # fmt: skip
    launcher = _launcher(args)
    step = step_node(env, started_by_us=bool(hosts)) if launcher == "slurm" else None
    if step is not None:
        node_rank = step if hosts else node_rank
        if args.distributed_backend != "gloo":
            check_gpus(env, visible_gpus(env))
    if launcher == "slurm" and step is None and has_slurm(args, env):
        nodes = allocation(args, env)
        asked = args.master_addr or main_node_among(env, [node.host for node in nodes])
        address = asked or env.get("MASTER_ADDR") or nodes[0].host
        run = replace(run, launcher="slurm", nodes=nodes, master_addr=address, master_port=port or job_port(env))
    else:
        # A hostfile that nobody named says nothing to somebody who types on each machine.
        typed = node_rank is not None and not hosts and not args.hostfile
        listed = () if typed else hosts_of(args, hosts, env)
        manual = find_manual_node(args, node_rank, listed, hosts, env)
        if manual is not None:
            run = _manual_run(run, args, manual, launcher, env)
        elif listed and (len(listed) > 1 or args.force_multi or not is_this_machine(listed[0].host)):
            run = _over_hosts(run, args, listed, launcher, env)
        else:
            nodes = _local_nodes(args, listed, env)
            run = replace(run, launcher="torchrun" if launcher == "torchrun" else "local", nodes=nodes)
    if all(node.ranks for node in run.nodes):
        alone = run.launcher in ("local", "torchrun") and len(run.nodes) == 1
        check_world(env, run.world_size, on_one_machine=alone)
        run = run.for_world(run.world_size)
    return run


def _launcher(args: "NeoXArgs") -> str:
    """The launcher that is asked for, by its key or by one of GPT-NeoX's two switches. Raises LaunchError for
    both."""
    if args.deepspeed_slurm and args.deepspeed_mpi:
        raise LaunchError("deepspeed_slurm and deepspeed_mpi are both true; one of them starts the ranks")
    return "slurm" if args.deepspeed_slurm else "openmpi" if args.deepspeed_mpi else args.launcher


def _gpus(args: "NeoXArgs", env: Mapping[str, str]) -> list[str]:
    """GPUs that ranks of this machine may take; none where the run is asked to work on CPUs."""
    return [] if args.distributed_backend == "gloo" else visible_gpus(env)


def _local_nodes(args: "NeoXArgs", listed: Sequence[Node], env: Mapping[str, str]) -> tuple[Node]:
    """The ranks of this machine, when it is the only one."""
    if listed:  # include and exclude have chosen among its slots
        ranks = listed[0].ranks if args.num_gpus is None else args.num_gpus
        count, devices = choose_ranks(_gpus(args, env), ranks, listed[0].include())
    else:
        count, devices = choose_local_ranks(args, env, _gpus(args, env))
    return (Node(socket.gethostname(), count, devices),)


def _manual_run(run: Run, args: "NeoXArgs", manual: ManualNode, launcher: str, env: Mapping[str, str]) -> Run:
    """The run on this machine among several on which the same line is typed."""
    nodes, node = list(manual.nodes), manual.nodes[manual.node_rank]
    if manual.listed:
        count, devices = choose_ranks(_gpus(args, env), node.ranks, node.include())
    else:
        count, devices = choose_local_ranks(args, env, _gpus(args, env), manual.ranks)
    if len(nodes) == 1:
        return replace(run, nodes=(Node(nodes[0].host, count, devices),))
    nodes[manual.node_rank] = replace(node, ranks=count, devices=devices)
    return replace(
        run, launcher="torchrun" if launcher == "torchrun" else "nodes", nodes=tuple(nodes), node_rank=manual.node_rank,
        master_addr=manual.master_addr, master_port=manual.master_port,
    )  # fmt: skip


def _over_hosts(run: Run, args: "NeoXArgs", listed: Sequence[Node], launcher: str, env: Mapping[str, str]) -> Run:
    """The run on other machines, which are reached over ssh or by MPI. Raises LaunchError for other
    launchers."""
    if launcher in ("slurm", "torchrun"):
        where = "inside sbatch or salloc" if launcher == "slurm" else "on each machine, with --node_rank 0, 1, ..."
        raise LaunchError(
            f"launcher: {launcher} is used {where}; pdsh, openmpi and mvapich start ranks on other machines"
        )
    address = args.master_addr or main_node_among(env, [node.host for node in listed]) or listed[0].host
    if address in ("localhost", "127.0.0.1") and not all(is_this_machine(node.host) for node in listed):
        address = socket.gethostname()
    environment = carried(env)
    if launcher != "pdsh":  # with pdsh a launcher on each machine sees to it
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(node.ranks or 1 for node in listed))))
    return replace(
        run, launcher=launcher, nodes=tuple(listed), master_addr=address, master_port=run.master_port or DEFAULT_PORT,
        environment=environment,
    )  # fmt: skip


def _name_of_args_file(script: Path) -> str:
    # A name of its own: runs may share log_dir, and ranks read the file seconds later.
    return f"neox_args.{script.stem}.{time.strftime('%Y%m%d-%H%M%S')}.{socket.gethostname()}.{os.getpid()}.json"
