"""A run in a Slurm job: srun starts one launcher on every node, and that one the ranks of its node.

Ranks that srun starts itself (`srun --ntasks-per-node=4 python train.py ...`) need none of this:
`process_info`.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.launch.environment import DEFAULT_PORT, LaunchError, install_root, port_of
from megatron.launch.hosts import Node
from megatron.launch.run import Run
from megatron.launch.site import sbatch_line
from megatron.process import run_files, say
from megatron.process.run_files import Problems

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

REQUEUE = 124  # exit code: told to stop by USR1, saved, not finished. slurm/job.sh queues the job again


def allocation(args: "NeoXArgs", env: Mapping[str, str]) -> tuple[Node, ...]:
    """Machines of this allocation with the ranks of each: num_gpus, else its tasks where the job has several
    on a node, else its GPUs, else one. Raises LaunchError."""
    if args.include or args.exclude:
        key = "include" if args.include else "exclude"
        raise LaunchError(f"{key}: Slurm chooses the machines and GPUs of a job; remove it (sbatch --exclude, --gres)")
    tasks = tasks_asked_for(env) or (1,) * len(task_counts(env.get("SLURM_TASKS_PER_NODE", "1")))
    if args.num_nodes > len(tasks):
        raise LaunchError(
            f"num_nodes: {args.num_nodes} asked for, the job has {len(tasks)}; sbatch --nodes={args.num_nodes}"
        )
    gpus = _gpus_asked_for(scontrol("show", "job", env["SLURM_JOB_ID"]), env)
    ranks = [args.num_gpus or (count if max(tasks) > 1 else gpus or 1) for count in tasks]
    hosts = scontrol("show", "hostnames", env.get("SLURM_JOB_NODELIST", "")).split()
    nodes = [Node(host, count) for host, count in zip(hosts, ranks, strict=True)]
    return tuple(nodes[: args.num_nodes] if args.num_nodes > 0 else nodes)


def job_port(env: Mapping[str, str]) -> int:
    """Where launchers meet: jobs that share a node must not share a port."""
    return port_of(env.get("MASTER_PORT") or DEFAULT_PORT + int(env.get("SLURM_JOB_ID") or 0) % 1000)


def has_slurm(args: "NeoXArgs", env: Mapping[str, str]) -> bool:
    """Whether launchers can be started by srun: in a job. False on a machine without Slurm, where the ranks
    are started as without the key. Raises LaunchError where Slurm is, but no job yet."""
    if "SLURM_JOB_ID" in env:
        return True
    if shutil.which("srun") is None:
        return False
    raise LaunchError(
        "launcher: slurm starts ranks in a job, and this is none; submit it: "
        f"{sbatch_line(args, env)} (or salloc; launcher: pdsh starts ranks here)"
    )


def step_node(env: Mapping[str, str], started_by_us: bool) -> int | None:
    """Which node of its step a launcher is on that srun started; None outside a step. Raises LaunchError
    where others started it on several nodes, or several times on one."""
    if "SLURM_STEP_ID" not in env:
        return None
    if not started_by_us and int(env.get("SLURM_STEP_NUM_NODES") or 1) > 1:
        raise LaunchError("deepy.py starts srun itself: type it in the batch script or in salloc's shell, without srun")
    if max(task_counts(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))) > 1:
        raise LaunchError(
            "srun started deepy.py several times on a node, and each would start all its ranks: use "
            "--ntasks-per-node=1, or let srun start the ranks: srun python train.py CONFIG..."
        )
    return int(env.get("SLURM_NODEID", "0"))


def check_gpus(env: Mapping[str, str], seen: Sequence[str]) -> None:
    """Raises LaunchError where a node has lost GPUs that Slurm gave to the job: the CPU would take their
    place."""
    given = env.get("SLURM_GPUS_ON_NODE", "")
    if "SLURM_STEP_ID" in env and given.isdecimal() and int(given) > len(seen):
        raise LaunchError(
            f"Slurm gave this node {given} GPUs, of which torch sees {len(seen)}: run nvidia-smi there, and leave the "
            f"node out (sbatch --exclude={env.get('SLURMD_NODENAME', '')}); without GPUs: sbatch --gres=none"
        )


def task_counts(text: str) -> tuple[int, ...]:
    """`4(x2),1` -> (4, 4, 1), as SLURM_TASKS_PER_NODE is written."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"cannot read {text!r} of SLURM_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def tasks_asked_for(env: Mapping[str, str]) -> tuple[int, ...] | None:
    """Tasks of each node, where the job was submitted with a number of them.

    Else SLURM_TASKS_PER_NODE counts CPUs, and SLURM_NTASKS is unset, or that of the job from which this one
    was submitted.
    """
    counts = task_counts(env.get("SLURM_TASKS_PER_NODE", "1"))
    return counts if env.get("SLURM_NTASKS") == str(sum(counts)) else None


def srun(run: Run) -> tuple[list[str], dict[str, str]]:
    """A launcher on every node, with all that the job has there; each finds its place by SLURM_NODEID."""
    count = str(len(run.nodes))
    words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none"]
    words += ["--kill-on-bad-exit=1", "--wait=60", "--export=ALL"]
    words += [f"--comment={run.args.comment}"] if run.args.comment else []
    words += [f"--account={run.args.account}"] if run.args.account else []
    launcher_command = [
        sys.executable,
        "-u",
        str(install_root() / "deepy.py"),
        "--hosts",
        *map(str, run.nodes),
    ]
    launcher_command += ["--master_addr", run.master_addr, "--master_port", str(run.master_port)]
    return [*words, *launcher_command, *run.command[2:]], {}


def for_requeued_start(run: Run, env: Mapping[str, str]) -> Run:
    """The run as a job that Slurm has queued again goes on: without `restart` and `iteration` once it has
    saved.

    These keys say how a run starts, and have had their effect. The first start of a job is noted by a file in
    log_dir, for later ones to compare; a first start returns the run as it is.
    """
    note = run.log_dir / f"slurm-{env['SLURM_JOB_ID']}.started"
    if not _restarts(env) or not note.exists():
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
        return run
    latest = Path(run.args.save_dir or "") / "latest"
    if latest.is_file() and latest.stat().st_mtime_ns >= note.stat().st_mtime_ns:
        return replace(run, args=run.args.replace(restart=False, iteration=None))
    return run


def read_status(args: "NeoXArgs") -> dict[str, Any]:
    """What the run's status.json holds; empty before there is one, and, which is said, where it cannot be
    read."""
    for _ in range(3):  # another node may have written it a moment ago
        problems = Problems()
        status = run_files.read_status(Path(args.save_dir or ""), problems)
        if status:
            break
        time.sleep(0.3)
    for line in problems.lines():
        say(f"deepy.py: warning: {line}")
    return status


def job_exit_code(
    args: "NeoXArgs",
    code: int,
    stop_requested: bool,
    status_before: Mapping[str, Any],
    env: Mapping[str, str],
) -> int:
    """deepy.py's exit code: REQUEUE when the run was told to stop by USR1, has saved and is not finished.

    status_before: `read_status` at the start. A start that came no further than the one before is not
    repeated: a job whose time is too short would come back for ever.
    """
    status = read_status(args)
    if not stop_requested or code != 0 or status.get("status") != "stopped":
        return code
    if _restarts(env) and status.get("iteration") == status_before.get("iteration"):
        say(
            f"deepy.py: error: this start of job {env['SLURM_JOB_ID']} came no further than iteration "
            f"{status.get('iteration')}, where it began; it is not queued again: give it more time (sbatch --time)"
        )
        return 1
    return REQUEUE


def _restarts(env: Mapping[str, str]) -> int:
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def _gpus_asked_for(job: str, env: Mapping[str, str]) -> int:
    """GPUs of a node that a step gets. With --exclusive the batch script is shown all that the node has."""
    asked = dict(re.findall(r"TresPer(\w+)=(\S*gpu\S*)", job))
    if "Node" in asked:
        return int((re.search(r"gpu(?:[:/][^,:=]*[A-Za-z][^,:=]*)?[:=](\d+)", asked["Node"]) or [0, 1])[1])
    return int(env.get("SLURM_GPUS_ON_NODE") or 0) if asked else 0


def scontrol(*words: str) -> str:
    """What `scontrol` with these arguments prints. Raises LaunchError where it is missing or fails."""
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise LaunchError("launcher: slurm needs scontrol, which is not on PATH") from None
    except subprocess.CalledProcessError as problem:
        raise LaunchError(f"scontrol {shlex.join(words)}: {problem.stderr.strip()}") from None
