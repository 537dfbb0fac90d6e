"""Starts a run. Plans and renderers only describe it; all side effects are here."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.launch.environment import LaunchError
from megatron.launch.hosts import hosts_of
from megatron.launch.launcher_rendezvous import LauncherRendezvous
from megatron.launch.local import run_local, run_node
from megatron.launch.manual_nodes import is_pod
from megatron.launch.plan import plan
from megatron.launch.ranks import die_with_parent
from megatron.launch.run import Run, make_folders, write_args_file, write_text
from megatron.launch.runners import (
    check_starter,
    hostfile_of,
    hostfile_path,
    manual_node_lines,
    mvapich,
    openmpi,
    pdsh,
    torchrun,
)
from megatron.launch.slurm import for_requeued_start, job_exit_code, read_status, srun
from megatron.launch.ssh_supervisor import SshSupervisor
from megatron.launch.typed_variables import check_world, resolve_main_node
from megatron.launch.watch import Outcome, record_signals
from megatron.process import say

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

Renderer = Callable[[Run], tuple[list[str], dict[str, str]]]


def launch(
    script: str | Path,
    args: "NeoXArgs",
    script_args: Sequence[str] = (),
    node_rank: int | None = None,
    hosts: Sequence[str] = (),
) -> int:
    """Runs `script` with the configuration `args` and returns the exit code of the run. With torchrun this
    call does not return.

    A failed run is started again up to `max_restarts` times, on all machines together. Ranks find the number
    of restarts in NEOX_RESTARTS. They read the resolved args from the file
    `<log_dir>/neox_args.<script>.*.json`, which the flag `--neox-args` names.

    Raises LaunchError for machines, GPUs, ports and folders that are not available, and ConfigError for a
    layout that does not fit.
    """
    run = plan(script, args, script_args, node_rank, hosts)
    make_folders(run)
    if run.launcher not in ("local", "nodes"):
        return _start(run)
    rendezvous = LauncherRendezvous(run, args.rendezvous_timeout_s) if run.launcher == "nodes" else None
    saved, restarts = _latest(args), 0
    while True:
        if rendezvous is None:
            write_args_file(run)
        may_restart = restarts < args.max_restarts
        outcome = (
            run_local(run, restarts, may_restart)
            if rendezvous is None
            else run_node(run, rendezvous, restarts, may_restart)
        )
        if not outcome.repeatable or restarts == args.max_restarts:
            return _exit_code(args, outcome)
        restarts += 1
        say(f"deepy.py: restart {restarts} of {args.max_restarts} after {outcome.reason}")
        if _latest(args) != saved and (args.restart or args.iteration is not None):
            # These said how the run starts; it has saved since, and goes on from there.
            args = args.replace(restart=False, iteration=None)
        run = plan(script, args, script_args, node_rank, hosts, args_file=run.args_file)


def dry_run(
    script: str | Path,
    args: "NeoXArgs",
    words: Sequence[str],
    node_rank: int | None = None,
    hosts: Sequence[str] = (),
) -> list[str]:
    """Returns the commands that `launch` would start, one line per machine, quoted for a shell. Nothing is
    started or written.

    With `hosts` and no node_rank, the lines are those to type on each machine.

    words: the arguments after the flags of deepy.py: the script, its files and further ones. Raises the same
    errors as `launch`.
    """
    if hosts and node_rank is None:
        nodes = hosts_of(args, hosts, os.environ)
        address = args.master_addr or resolve_main_node(os.environ, [node.host for node in nodes]) or nodes[0].host
        if all(node.ranks for node in nodes):
            check_world(os.environ, sum(node.ranks or 0 for node in nodes), on_one_machine=False)
        return [f"{host}: {line}" for host, line in manual_node_lines(nodes, words, address, args.master_port)]
    run = plan(script, args, (), node_rank, hosts)
    if run.launcher in ("local", "nodes"):
        count, gpus = run.node.ranks or 0, ",".join(run.node.devices)
        description = f"{count} rank{'s' * (count > 1)}" + (f", GPUs {gpus}" if gpus else "")
        if run.launcher == "nodes":
            description += f", node {run.node_rank} of {len(run.nodes)}, meeting at {run.master_addr}:{run.master_port}"
        return [f"{run.node.host} ({description}): {shlex.join(run.command)}"]
    command, env = _renderer(run)(run)
    return [" ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(command)])]


def _renderer(run: Run) -> Renderer:
    starters = {
        "pdsh": pdsh,
        "openmpi": openmpi,
        "mvapich": mvapich,
        "slurm": srun,
        "torchrun": torchrun,
    }
    return starters[run.launcher]


def _start(run: Run) -> int:
    """Starts the run with its launcher program (such as pdsh or srun), waits for its end, and returns the
    exit code."""
    check_starter(run)
    if run.launcher == "slurm":
        run = for_requeued_start(run, os.environ)
    status_before = read_status(run.args) if run.launcher == "slurm" else {}
    command, env = _renderer(run)(run)
    write_args_file(run)
    if run.launcher == "torchrun":
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, **env})
    if run.launcher in ("pdsh", "openmpi", "mvapich"):
        if not run.args.no_ssh_check:
            _check_ssh(run.nodes[0].host)
        write_text(Path(hostfile_path(run)), hostfile_of(run))
    with record_signals() as received:
        code = _watch(command, {**os.environ, **env}, SshSupervisor(run) if run.launcher == "pdsh" else None, received)
    if run.launcher == "slurm":
        return job_exit_code(run.args, code, signal.SIGUSR1 in received, status_before, os.environ)
    return code


def _watch(
    command: Sequence[str], env: Mapping[str, str], supervisor: SshSupervisor | None, received: list[int]
) -> int:
    """Runs a launcher program (such as pdsh) to its end and returns its exit code.

    The first signal is passed on, so that ranks save and stop. The second signal ends everything.
    supervisor: passes signals on; None: the launcher program does.
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
                say(f"deepy.py: {name}: " + ("all ranks end" if passed_on > 1 else "passed on to the ranks"))
                if passed_on > 1:
                    process.terminate()
                elif supervisor is not None:
                    supervisor.send(received[0])
                else:
                    # mpirun and srun hand it on, and end at the other two
                    process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        return 128 - process.returncode if process.returncode < 0 else process.returncode
    finally:
        process.kill()
        process.wait()


def _check_ssh(host: str) -> None:
    """Raises LaunchError when a host cannot be reached without a password."""
    command = ["ssh", "-o", "PasswordAuthentication=no", "-o", "BatchMode=yes", host, "true"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        reason = result.stderr.strip().rpartition("\n")[2] if result.returncode else None
    except FileNotFoundError:
        reason = "there is no ssh on PATH"
    except subprocess.TimeoutExpired:
        reason = "no answer within 30 s"
    if reason is not None:
        raise LaunchError(
            f"{host} cannot be reached over ssh without a password ({reason}); set up an ssh key, or type on each "
            "machine its line of `--dry-run --hosts ...`; no_ssh_check: true skips this check"
        )


def _exit_code(args: "NeoXArgs", outcome: Outcome) -> int:
    """Returns deepy.py's exit code. In a pod it is 128 + signal if a signal stopped an unfinished run.

    With code 0 Kubernetes would count the job as complete when a node is drained, and would not continue it
    elsewhere.
    """
    if outcome.code or not outcome.signal or not is_pod(os.environ) or read_status(args).get("status") == "finished":
        return outcome.code
    say(f"deepy.py: exit code {128 + outcome.signal}, for the run is not finished and this pod may start again")
    return 128 + outcome.signal


def _latest(args: "NeoXArgs") -> int | None:
    """Returns the time of the run's last checkpoint in ns since 1970; None before the first."""
    try:
        return (Path(args.save_dir) / "latest").stat().st_mtime_ns if args.save_dir else None
    except FileNotFoundError:
        return None
