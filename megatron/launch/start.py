"""Start a run: the one place that does what plans and renderers only describe."""

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
from megatron.launch.typed_variables import check_world, main_node_among
from megatron.launch.watch import Outcome, signals_kept
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
    """Run `script` where and as `args` ask; the exit code of the run. With torchrun this call does not
    return.

    A run that failed is started again up to `max_restarts` times, on all machines together; its ranks find
    the number in NEOX_RESTARTS. The resolved args reach the ranks through a file
    `<log_dir>/neox_args.<script>.*.json`, named by the flag `--neox-args`. Raises LaunchError for machines,
    GPUs, ports and folders that cannot be had, ConfigError for a layout that does not fit.
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
        again = restarts < args.max_restarts
        outcome = run_local(run, restarts, again) if rendezvous is None else run_node(run, rendezvous, restarts, again)
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
    """What `launch` would start, a line a machine, quoted for a shell; nothing is started or written.

    words: what was typed behind the flags of starting: with `hosts` and no node_rank the lines are those to
    type on each machine. Raises as `launch`.
    """
    if hosts and node_rank is None:
        nodes = hosts_of(args, hosts, os.environ)
        address = args.master_addr or main_node_among(os.environ, [node.host for node in nodes]) or nodes[0].host
        if all(node.ranks for node in nodes):
            check_world(os.environ, sum(node.ranks or 0 for node in nodes), on_one_machine=False)
        return [f"{host}: {line}" for host, line in manual_node_lines(nodes, words, address, args.master_port)]
    run = plan(script, args, (), node_rank, hosts)
    if run.launcher in ("local", "nodes"):
        count, gpus = run.node.ranks or 0, ",".join(run.node.devices)
        how = f"{count} rank{'s' * (count > 1)}" + (f", GPUs {gpus}" if gpus else "")
        if run.launcher == "nodes":
            how += f", node {run.node_rank} of {len(run.nodes)}, meeting at {run.master_addr}:{run.master_port}"
        return [f"{run.node.host} ({how}): {shlex.join(run.command)}"]
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
    """Hand the run to its starter and see it to the end."""
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
    with signals_kept() as received:
        code = _watch(command, {**os.environ, **env}, SshSupervisor(run) if run.launcher == "pdsh" else None, received)
    if run.launcher == "slurm":
        return job_exit_code(run.args, code, signal.SIGUSR1 in received, status_before, os.environ)
    return code


def _watch(
    command: Sequence[str], env: Mapping[str, str], supervisor: SshSupervisor | None, received: list[int]
) -> int:
    """Run a starter to its end; its exit code. A first signal asks the ranks to save and stop, a second ends
    all.

    received: the signals, as they come.
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
            f"{host} cannot be reached over ssh without a password ({reason}); set up a key, or type the lines of "
            "--dry-run with --hosts on each machine; no_ssh_check: true leaves this check out"
        )


def _exit_code(args: "NeoXArgs", outcome: Outcome) -> int:
    """deepy.py's exit code. In a pod, a run that stopped for a signal has not succeeded: a node is drained,
    and with code 0 the job would count as done instead of going on elsewhere."""
    if outcome.code or not outcome.signal or not is_pod(os.environ) or read_status(args).get("status") == "finished":
        return outcome.code
    say(f"deepy.py: exit code {128 + outcome.signal}, for the run is not finished and this pod may start again")
    return 128 + outcome.signal


def _latest(args: "NeoXArgs") -> int | None:
    """When the run last finished a checkpoint, in ns since 1970; None before the first."""
    try:
        return (Path(args.save_dir) / "latest").stat().st_mtime_ns if args.save_dir else None
    except FileNotFoundError:
        return None
