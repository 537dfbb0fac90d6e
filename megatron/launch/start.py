"""Starts a run as its plan describes, watches it to its end and returns its exit code."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.launch import runners
from megatron.launch.devices import cores, free_port
from megatron.launch.environment import LaunchError, ProcessInfo, port_of
from megatron.launch.heartbeat import SshSupervisor
from megatron.launch.hosts import hosts_of
from megatron.launch.launcher_rendezvous import LauncherRendezvous, RankAssignment
from megatron.launch.manual_nodes import is_pod
from megatron.launch.plan import plan
from megatron.launch.ranks import die_with_parent
from megatron.launch.run import Run, log_dir_of, make_folders, write_args_file
from megatron.launch.slurm import for_requeued_start, job_exit_code, read_status, srun
from megatron.launch.spares import SpareRanks
from megatron.launch.typed_variables import check_world, resolve_main_node
from megatron.launch.watch import FIRST_START, Attempt, Outcome, record_signals, watch_ranks
from megatron.process import say
from megatron.process.metrics_file import METRICS_FILE, read_metrics
from megatron.process.run_files import Problems

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

# The functions that return the command of each launcher program and the environment variables to add
_COMMANDS: Mapping[str, Callable[[Run], tuple[list[str], dict[str, str]]]] = {
    "pdsh": runners.pdsh, "openmpi": runners.openmpi, "mvapich": runners.mvapich, "slurm": srun,
    "torchrun": runners.torchrun,
}  # fmt: skip


def launch(
    script: str | Path,
    args: "NeoXArgs",
    script_args: Sequence[str] = (),
    node_rank: int | None = None,
    hosts: Sequence[str] = (),
    silent: bool = False,
) -> int:
    """Runs `script` with the configuration `args` and returns the exit code of the run. With torchrun this
    call does not return.

    A failed run is started again up to `max_restarts` times, on all machines together, if possible by ranks
    that waited (`spares`). Ranks find the number of restarts in NEOX_RESTARTS, and the reason of the last one
    in NEOX_RESTART_CAUSE. They read the resolved args from the file
    `<log_dir>/neox_args.<script>.*.json`, which the flag `--neox-args` names.

    silent: whether only failures are shown, as with the flag `--quiet`.

    Raises LaunchError for machines, GPUs, ports and folders that are not available, and ConfigError for a
    layout that does not fit.
    """
    run = plan(script, args, script_args, node_rank, hosts)
    if silent and run.launcher not in ("local", "nodes"):
        raise LaunchError(f"--quiet: the output of the launcher {run.launcher} cannot be held back; redirect it")
    make_folders(run)
    if run.launcher not in ("local", "nodes"):
        return _start(run)
    rendezvous = LauncherRendezvous(run, args.rendezvous_timeout_s) if run.launcher == "nodes" else None
    saved, started, attempt = _latest(args), time.time(), FIRST_START
    with ExitStack() as at_end:
        spares = at_end.enter_context(closing(SpareRanks())) if args.max_restarts and args.spare_ranks else None
        while True:
            attempt = replace(attempt, may_restart=attempt.number < args.max_restarts, silent=silent, spares=spares)
            if rendezvous is None:
                write_args_file(run)
                outcome = run_local(run, attempt)
            else:
                outcome = run_node(run, rendezvous, attempt)
            if not outcome.repeatable or not attempt.may_restart:
                if attempt.number:
                    _say_share_of_steps(run, attempt.number, started)
                return _exit_code(args, outcome)
            attempt = replace(attempt, number=attempt.number + 1, cause=outcome.reason)
            say(f"deepy.py: restart {attempt.number} of {args.max_restarts} after {outcome.reason}")
            if _latest(args) != saved and (args.restart or args.iteration is not None):
                # These keys apply to the first start only: the run has saved since, and resumes from there.
                args = args.replace(restart=False, iteration=None)
            run = plan(script, args, script_args, node_rank, hosts, args_file=run.args_file)


def dry_run(
    script: str | Path, args: "NeoXArgs", words: Sequence[str], node_rank: int | None = None, hosts: Sequence[str] = ()
) -> list[str]:
    """Returns the commands that `launch` would start, one line per machine, quoted for a shell. Nothing is
    started or written.

    With `hosts` and no node_rank, the lines are those to type on each machine.

    words: the arguments after the flags of deepy.py: the script, its configuration files and further
    arguments. Raises the same errors as `launch`.
    """
    if hosts and node_rank is None:
        nodes = hosts_of(args, hosts, os.environ)
        address = args.master_addr or resolve_main_node(os.environ, [node.host for node in nodes]) or nodes[0].host
        if all(node.ranks for node in nodes):
            check_world(os.environ, sum(node.ranks or 0 for node in nodes), on_one_machine=False)
        return [f"{host}: {line}" for host, line in runners.manual_node_lines(nodes, words, address, args.master_port)]
    run = plan(script, args, (), node_rank, hosts)
    if run.launcher in ("local", "nodes"):
        count, gpus = run.node.ranks or 0, ",".join(run.node.devices)
        description = f"{count} rank{'s' * (count > 1)}" + (f", GPUs {gpus}" if gpus else "")
        if run.launcher == "nodes":
            description += f", node {run.node_rank} of {len(run.nodes)}, meeting at {run.master_addr}:{run.master_port}"
        return [f"{run.node.host} ({description}): {shlex.join(run.command)}"]
    command, env = _COMMANDS[run.launcher](run)
    return [" ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(command)])]


def _start(run: Run) -> int:
    """Starts the run with its launcher program (such as pdsh or srun), waits for its end, and returns the
    exit code."""
    runners.check_starter(run)
    if run.launcher == "slurm":
        run = for_requeued_start(run, os.environ)
    status_before = read_status(run.args) if run.launcher == "slurm" else {}
    command, env = _COMMANDS[run.launcher](run)
    write_args_file(run)
    if run.launcher == "torchrun":
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, **env})
    if run.launcher in ("pdsh", "openmpi", "mvapich"):
        if not run.args.no_ssh_check:
            _check_ssh(run.nodes[0].host)
        runners.write_hostfile(run)
    with record_signals() as received:
        code = _watch(command, {**os.environ, **env}, SshSupervisor(run) if run.launcher == "pdsh" else None, received)
    if run.launcher == "slurm":
        return job_exit_code(run.args, code, signal.SIGUSR1 in received, status_before, os.environ)
    return code


def _watch(
    command: Sequence[str], env: Mapping[str, str], supervisor: SshSupervisor | None, received: list[int]
) -> int:
    """Runs a launcher program (such as pdsh) to its end and returns its exit code.

    The first signal is passed on, so that ranks save and stop. The second signal ends the launcher program
    and all ranks.
    supervisor: passes signals on to the ranks; None: the launcher program does so.
    received: list of signals, which a handler extends as they arrive.
    """
    # A session of its own: Ctrl-C reaches us alone, and the ranks once.
    process = subprocess.Popen(
        list(command), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGTERM),
    )  # fmt: skip
    passed_on = 0
    try:
        while process.poll() is None:
            if supervisor is not None:
                supervisor.beat()
            while passed_on < len(received):
                name = signal.Signals(received[passed_on]).name
                passed_on += 1
                say(
                    f"deepy.py: {name}: "
                    + ("second signal, ends all ranks" if passed_on > 1 else "passed on to all ranks")
                )
                if passed_on > 1:
                    process.terminate()
                elif supervisor is not None:
                    supervisor.send(received[0])
                else:
                    # mpirun and srun pass USR1 on to the ranks; SIGTERM and SIGINT would end them
                    process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        return 128 - process.returncode if process.returncode < 0 else process.returncode
    finally:
        process.kill()
        process.wait()


def _check_ssh(host: str) -> None:
    """Raises LaunchError if a host cannot be reached over ssh without a password."""
    command = ["ssh", "-o", "PasswordAuthentication=no", "-o", "BatchMode=yes", host, "true"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        reason = result.stderr.strip().rpartition("\n")[2] if result.returncode else None
    except FileNotFoundError:
        reason = "ssh is not on PATH"
    except subprocess.TimeoutExpired:
        reason = "no answer within 30 s"
    if reason is not None:
        raise LaunchError(
            f"{host} cannot be reached over ssh without a password ({reason}); set up an ssh key, or type on each "
            "machine its line of `--dry-run --hosts ...`; no_ssh_check: true skips this check"
        )


def _exit_code(args: "NeoXArgs", outcome: Outcome) -> int:
    """Returns deepy.py's exit code. In a Kubernetes pod it is 128 + signal if a signal stopped the run before
    its end.

    With code 0 Kubernetes would count the job as complete when a node is drained, and would not continue it
    elsewhere.
    """
    if outcome.code or not outcome.signal or not is_pod(os.environ) or read_status(args).get("status") == "finished":
        return outcome.code
    say(
        f"deepy.py: exit code {128 + outcome.signal}, because the run is not finished and "
        "Kubernetes may start this pod again"
    )
    return 128 + outcome.signal


def _say_share_of_steps(run: Run, restarts: int, started: float) -> None:
    """Prints how much of the time since `started` (seconds since 1970) was spent in steps that count. A step
    that a restart has repeated counts once."""
    try:
        rows = list(read_metrics(log_dir_of(run.args) / METRICS_FILE, Problems()))
    except OSError:
        rows = []
    if run.node_rank or not rows:  # rank 0 of node 0 writes them
        return
    seconds, previous = 0.0, 0
    for row in rows:
        if row.get("runtime/start_time", 0) >= started:
            seconds += (row["iteration"] - previous) * row.get("runtime/iteration_time", 0.0)
        previous = row["iteration"]
    total, plural = time.time() - started, "s" * (restarts > 1)
    say(
        f"deepy.py: {restarts} restart{plural}; {seconds:.0f} s of {total:.0f} s ({seconds / total:.1%}) were steps "
        "that count"
    )


def _latest(args: "NeoXArgs") -> int | None:
    """Returns the time of the run's last checkpoint, in ns since 1970; None before the first checkpoint."""
    try:
        return (Path(args.save_dir) / "latest").stat().st_mtime_ns if args.save_dir else None
    except FileNotFoundError:
        return None


def run_local(run: Run, attempt: Attempt = FIRST_START) -> Outcome:
    """Starts all ranks of a run that uses this machine alone, watches them to the end and returns the
    outcome.

    Raises LaunchError if the port is in use.
    """
    assignment = RankAssignment(0, run.world_size, _port(run.master_port))
    ranks = environments(run, assignment, attempt)
    return watch_ranks(run.command, ranks, run.log_dir, attempt=attempt)


def run_node(run: Run, rendezvous: LauncherRendezvous, attempt: Attempt) -> Outcome:
    """Waits for the launchers of all machines, then starts this machine's ranks and watches them. Returns the
    outcome once the run has ended on all machines.

    Raises LaunchError if a machine does not join, and ConfigError if the layout does not fit the number of
    ranks.
    """
    assignment = rendezvous.assemble(attempt.number)
    try:
        write_args_file(run.for_world(assignment.world_size))
    except BaseException:
        rendezvous.leave(Outcome(1))
        raise
    if run.node_rank:
        ranks = f"{assignment.first_rank} to {assignment.first_rank + (run.node.ranks or 0) - 1}"
        say(
            f"deepy.py: node {run.node_rank} runs ranks {ranks} of {assignment.world_size}; their output is in "
            f"{run.log_dir}, and node 0 shows the output of rank 0"
        )
    ranks_env = environments(run, assignment, attempt)
    return rendezvous.leave(watch_ranks(run.command, ranks_env, run.log_dir, rendezvous, attempt))


def environments(run: Run, assignment: RankAssignment, attempt: Attempt = FIRST_START) -> list[dict[str, str]]:
    """Returns the environment variables of each rank on this machine: those of this process, and the rank,
    world size and GPUs.

    OMP_NUM_THREADS is set unless the user has set it.
    """
    first_rank, world_size, port = assignment.first_rank, assignment.world_size, assignment.port
    base, count = {**os.environ, "NEOX_RESTARTS": str(attempt.number)}, run.node.ranks or 0
    base["NEOX_RESTART_CAUSE"] = attempt.cause
    if attempt.spares is not None and attempt.may_restart:
        base.update(attempt.spares.begin_start())
    if run.node.devices:
        base["CUDA_VISIBLE_DEVICES"] = ",".join(run.node.devices)
    if count > 1:
        # Each rank would otherwise take every core.
        base.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    processes = (
        ProcessInfo(first_rank + local_rank, world_size, local_rank, count, run.master_addr, port, "torchrun")
        for local_rank in range(count)
    )
    return [{**base, **process.variables()} for process in processes]


def _port(requested: int | None) -> int:
    """Returns the port at which ranks meet: `requested`, else MASTER_PORT, else a free port. Raises
    LaunchError if it cannot be used."""
    source, text = "master_port", os.environ.get("MASTER_PORT")
    if requested is None and text:
        source = "MASTER_PORT in the environment"
        requested = port_of(text)
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
