"""Plans a run from its configuration, the environment and the command line, without starting it."""

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
from megatron.launch.typed_variables import check_world, choose_local_ranks, resolve_main_node, total_ranks
from megatron.neox_arguments.compat.methods import ARGS_FLAG

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def plan(
    script: str | Path, args: "NeoXArgs", script_args: Sequence[str] = (), node_rank: int | None = None,
    hosts: Sequence[str] = (), env: Mapping[str, str] | None = None, args_file: Path | None = None,
) -> Run:  # fmt: skip
    """Returns the plan of a run: which ranks start where, and with which command. Nothing is written or
    started.

    script_args: further arguments of the script.
    node_rank, hosts: the flags `--node_rank` and `--hosts`.
    env: None: this process's environment.
    args_file: the file of resolved arguments of an earlier start, to be reused; None: a new file.

    Raises LaunchError for machines or GPUs that do not exist or contradict each other, and ConfigError for a
    layout that does not fit the number of ranks.
    """
    env = os.environ if env is None else env
    script = Path(script)
    # A unique name: runs may share log_dir, and ranks read the file seconds later.
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}.{socket.gethostname()}.{os.getpid()}"
    args_file = args_file or log_dir_of(args) / f"neox_args.{script.stem}.{unique}.json"
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
        requested = args.master_addr or resolve_main_node(env, [node.host for node in nodes])
        address = requested or env.get("MASTER_ADDR") or nodes[0].host
        run = replace(run, launcher="slurm", nodes=nodes, master_addr=address, master_port=port or job_port(env))
    else:
        # With --node_rank, the command is typed on each machine: a default hostfile is ignored.
        is_manual = node_rank is not None and not hosts and not args.hostfile
        host_nodes = () if is_manual else hosts_of(args, hosts, env)
        manual = find_manual_node(args, node_rank, host_nodes, hosts, env)
        if manual is not None:
            run = _manual_run(run, args, manual, launcher, env)
        elif host_nodes and (len(host_nodes) > 1 or args.force_multi or not is_this_machine(host_nodes[0].host)):
            run = _over_hosts(run, args, host_nodes, launcher, env)
        else:
            listed_node = host_nodes[0] if host_nodes else None
            ranks = listed_node.ranks if listed_node is not None and args.num_gpus is None else args.num_gpus
            nodes = (Node(socket.gethostname(), *_local_ranks(args, env, listed_node, ranks)),)
            run = replace(run, launcher="torchrun" if launcher == "torchrun" else "local", nodes=nodes)
    if all(node.ranks for node in run.nodes):
        is_single = run.launcher in ("local", "torchrun") and len(run.nodes) == 1
        check_world(env, run.world_size, on_one_machine=is_single)
        run = run.for_world(run.world_size)
    return run


def _launcher(args: "NeoXArgs") -> str:
    """Returns the requested launcher: the key `launcher`, or GPT-NeoX's switches deepspeed_slurm and
    deepspeed_mpi.

    Raises LaunchError if both switches are on.
    """
    if args.deepspeed_slurm and args.deepspeed_mpi:
        raise LaunchError("deepspeed_slurm and deepspeed_mpi are both true; set only one of them")
    return "slurm" if args.deepspeed_slurm else "openmpi" if args.deepspeed_mpi else args.launcher


def _local_ranks(
    args: "NeoXArgs", env: Mapping[str, str], listed_node: Node | None, ranks: int | None
) -> tuple[int, tuple[str, ...]]:
    """Returns the number of ranks on this machine and their GPUs.

    listed_node: this machine in a hostfile or `--hosts`, if one names it.
    ranks: the requested number; None: one for each GPU.
    """
    gpus = [] if args.distributed_backend == "gloo" else visible_gpus(env)
    if listed_node is not None:  # include and exclude have chosen among its slots
        return choose_ranks(gpus, ranks, listed_node.include())
    return choose_local_ranks(args, env, gpus, ranks)


def _manual_run(run: Run, args: "NeoXArgs", manual: ManualNode, launcher: str, env: Mapping[str, str]) -> Run:
    """Returns the plan for this machine, if the same command line is typed on each of several machines."""
    nodes, node = list(manual.nodes), manual.nodes[manual.node_rank]
    count, devices = _local_ranks(args, env, node if manual.in_host_list else None, manual.ranks)
    if len(nodes) == 1:
        return replace(run, nodes=(Node(nodes[0].host, count, devices),))
    nodes[manual.node_rank] = replace(node, ranks=count, devices=devices)
    return replace(
        run, launcher="torchrun" if launcher == "torchrun" else "nodes", nodes=tuple(nodes), node_rank=manual.node_rank,
        master_addr=manual.master_addr, master_port=manual.master_port,
    )  # fmt: skip


def _over_hosts(run: Run, args: "NeoXArgs", host_nodes: Sequence[Node], launcher: str, env: Mapping[str, str]) -> Run:
    """Returns the plan of a run on other machines, reached over ssh (pdsh) or by MPI.

    Raises LaunchError for the launchers slurm and torchrun, which cannot start ranks on a list of hosts.
    """
    if launcher in ("slurm", "torchrun"):
        place = "inside sbatch or salloc" if launcher == "slurm" else "on each machine, with --node_rank 0, 1, ..."
        raise LaunchError(
            f"launcher: {launcher} works only {place}; to start ranks on other machines from here, set pdsh, openmpi "
            "or mvapich"
        )
    address = args.master_addr or resolve_main_node(env, [node.host for node in host_nodes]) or host_nodes[0].host
    if address in ("localhost", "127.0.0.1") and not all(is_this_machine(node.host) for node in host_nodes):
        address = socket.gethostname()
    environment = carried(env)
    if launcher != "pdsh":  # with pdsh the launcher on each machine sets it
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(node.ranks or 1 for node in host_nodes))))
    return replace(
        run, launcher=launcher, nodes=tuple(host_nodes), master_addr=address,
        master_port=run.master_port or DEFAULT_PORT, environment=environment,
    )  # fmt: skip
