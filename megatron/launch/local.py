"""Starts the ranks of this machine with their environments, and watches them to the end."""

import os
import socket
from collections.abc import Mapping

from megatron.launch.devices import cores, free_port
from megatron.launch.environment import LaunchError, ProcessInfo
from megatron.launch.launcher_rendezvous import LauncherRendezvous, RankAssignment
from megatron.launch.run import Run, write_args_file
from megatron.launch.watch import Outcome, watch_ranks
from megatron.process import say


def run_local(run: Run, restarts: int = 0, will_restart: bool = False) -> Outcome:
    """Starts all ranks of a run that uses this machine alone, watches them to the end and returns the
    outcome.

    restarts: how often the run was started again so far.
    will_restart: whether the caller starts the run again after a repeatable failure.

    Raises LaunchError if the port is in use.
    """
    assignment = RankAssignment(0, run.world_size, _port(run.master_port, os.environ))
    ranks_env = environments(run, assignment, restarts)
    return watch_ranks(run.command, ranks_env, run.log_dir, will_restart=will_restart)


def run_node(run: Run, rendezvous: LauncherRendezvous, restarts: int = 0, will_restart: bool = False) -> Outcome:
    """Waits for the launchers of all machines, then starts this machine's ranks and watches them. Returns the
    outcome once the run has ended on all machines.

    restarts, will_restart: as for `run_local`. Raises LaunchError if a machine does not join, and ConfigError
    for a layout that does not fit.
    """
    assignment = rendezvous.assemble(restarts)
    try:
        write_args_file(run.for_world(assignment.world_size))
    except BaseException:
        rendezvous.leave(Outcome(1))
        raise
    ranks = f"{assignment.first_rank} to {assignment.first_rank + (run.node.ranks or 0) - 1}"
    if run.node_rank:
        say(
            f"deepy.py: node {run.node_rank}: ranks {ranks} of {assignment.world_size}, their output is in "
            f"{run.log_dir}; that of rank 0 is shown on node 0"
        )
    ranks_env = environments(run, assignment, restarts)
    return rendezvous.leave(watch_ranks(run.command, ranks_env, run.log_dir, rendezvous, will_restart))


def environments(run: Run, assignment: RankAssignment, restarts: int = 0) -> list[dict[str, str]]:
    """Returns the environment variables of each rank on this machine: those of this process, and the rank,
    world size and GPUs.

    OMP_NUM_THREADS is set unless the user has set it. restarts: number of restarts so far, for NEOX_RESTARTS.
    """
    base = {**os.environ, "NEOX_RESTARTS": str(restarts)}
    count = run.node.ranks or 0
    return [_environment(run, assignment, local_rank, count, base) for local_rank in range(count)]


def _environment(
    run: Run, assignment: RankAssignment, local_rank: int, count: int, base: Mapping[str, str]
) -> dict[str, str]:
    rank, world_size = assignment.first_rank + local_rank, assignment.world_size
    process = ProcessInfo(rank, world_size, local_rank, count, run.master_addr, assignment.port, "torchrun")
    env = {**base, **process.variables()}
    if run.node.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(run.node.devices)
    if count > 1:
        # Each rank would otherwise take every core.
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    return env


def _port(requested: int | None, env: Mapping[str, str]) -> int:
    """Returns the rendezvous port: `requested`, else MASTER_PORT, else a free one. Raises LaunchError if it
    is in use."""
    source = "master_port"
    if requested is None and env.get("MASTER_PORT"):
        source = "MASTER_PORT in the environment"
        if not env["MASTER_PORT"].isdecimal():
            raise LaunchError(f"{source} is {env['MASTER_PORT']!r}, not a port number")
        requested = int(env["MASTER_PORT"])
    if requested is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", requested))
        except (OSError, OverflowError) as problem:
            raise LaunchError(
                f"{source}: port {requested} cannot be used ({problem}); set another, or unset it to use a free port"
            ) from None
    return requested
