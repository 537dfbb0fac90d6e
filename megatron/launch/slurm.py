"""Starts a run in a Slurm job: srun starts one launcher on every node, and each launcher starts its node's
ranks.

Ranks that srun starts directly (`srun --ntasks-per-node=4 python train.py ...`) do not use this module; they
find their rank with `process_info`.
"""

import os
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

from megatron.launch.container import read_container
from megatron.launch.environment import DEFAULT_PORT, LaunchError, install_root, port_of, read_integer
from megatron.launch.hosts import Node
from megatron.launch.run import Run
from megatron.launch.site import sbatch_line
from megatron.neox_arguments.values.integers import parse_integer
from megatron.process import run_files, say

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

REQUEUE = 124  # exit code of an unfinished run that saved and stopped on USR1: slurm/job.sh queues the job again


def allocation(args: "NeoXArgs", env: Mapping[str, str]) -> tuple[Node, ...]:
    """Returns the nodes of this job's allocation with the number of ranks on each.

    That number is num_gpus, else the tasks per node if a node has several, else the GPUs per node, else 1.
    Raises LaunchError if include or exclude is set, or if the job has too few nodes.
    """
    if args.include or args.exclude:
        key = "include" if args.include else "exclude"
        raise LaunchError(f"{key}: Slurm chooses machines and GPUs; remove the key, and use sbatch --exclude or --gres")
    tasks = tasks_asked_for(env) or (1,) * len(task_counts(env))
    if args.num_nodes > len(tasks):
        raise LaunchError(
            f"num_nodes: {args.num_nodes} requested, but the job has {len(tasks)} nodes; submit it with "
            f"--nodes={args.num_nodes}"
        )
    gpus = _gpus_asked_for(scontrol("show", "job", env["SLURM_JOB_ID"]), env)
    ranks = [args.num_gpus or (count if max(tasks) > 1 else gpus or 1) for count in tasks]
    hosts = scontrol("show", "hostnames", env.get("SLURM_JOB_NODELIST", "")).split()
    nodes = [Node(host, count) for host, count in zip(hosts, ranks, strict=True)]
    return tuple(nodes[: args.num_nodes] if args.num_nodes > 0 else nodes)


def job_port(env: Mapping[str, str]) -> int:
    """Returns the port where launchers meet: MASTER_PORT, else a port computed from the job id.

    So jobs that share a node use different ports.
    """
    return port_of(env.get("MASTER_PORT") or DEFAULT_PORT + read_integer(env, "SLURM_JOB_ID", 0) % 1000)


def has_slurm(args: "NeoXArgs", env: Mapping[str, str]) -> bool:
    """Returns whether this process is in a Slurm job, so that srun can start launchers.

    Returns False if this machine has no Slurm; ranks then start as without `launcher: slurm`. Raises
    LaunchError if this machine has Slurm but this process is not in a job.
    """
    if "SLURM_JOB_ID" in env:
        return True
    if shutil.which("srun") is None:
        return False
    raise LaunchError(
        "launcher: slurm starts ranks only in a Slurm job, and this shell is not in one; submit one: "
        f"{sbatch_line(args, env)} (or use salloc; launcher: pdsh starts the ranks here)"
    )


def step_node(env: Mapping[str, str], started_by_us: bool) -> int | None:
    """Returns the node index of a launcher within its srun step; None outside a step.

    started_by_us: whether deepy.py started srun. Raises LaunchError if the user's own srun started deepy.py
    on several nodes, or several times on one node.
    """
    if "SLURM_STEP_ID" not in env:
        return None
    if not started_by_us and read_integer(env, "SLURM_STEP_NUM_NODES", 1) > 1:
        raise LaunchError("deepy.py starts srun itself: run it without srun, in the batch script or in salloc's shell")
    if max(task_counts(env, "SLURM_STEP_TASKS_PER_NODE")) > 1:
        raise LaunchError(
            "srun started deepy.py several times on a node, and each would start all its ranks: use "
            "--ntasks-per-node=1, or let srun start the ranks: srun python train.py CONFIG..."
        )
    return read_integer(env, "SLURM_NODEID", 0)


def check_gpus(env: Mapping[str, str], visible: Sequence[str]) -> None:
    """Raises LaunchError if torch sees fewer GPUs than Slurm gave this node; ranks would otherwise run on the
    CPU."""
    allocated = env.get("SLURM_GPUS_ON_NODE", "")
    if "SLURM_STEP_ID" in env and (parse_integer(allocated) or 0) > len(visible):
        raise LaunchError(
            f"Slurm gave this node {allocated} GPUs, but torch sees {len(visible)}: run nvidia-smi there, or "
            f"exclude the node (sbatch --exclude={env.get('SLURMD_NODENAME', '')}); to run on CPUs: sbatch --gres=none"
        )


def task_counts(env: Mapping[str, str], name: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Returns the number of tasks on each node from the environment variable `name`: `4(x2),1` gives (4, 4,
    1).

    Returns (1,) if the variable is unset. Raises LaunchError for any other text.
    """
    counts, text = list[int](), env.get(name, "1")
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise LaunchError(
                f"{name}={text!r} in the environment cannot be read; expected numbers of tasks such as 4(x2),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def tasks_asked_for(env: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the number of tasks on each node; None if the job was submitted without a number of tasks.

    Without a number of tasks, SLURM_TASKS_PER_NODE counts CPUs, and SLURM_NTASKS is unset or was inherited
    from the job that submitted this one. So the numbers count only if they add up to SLURM_NTASKS.
    """
    counts = task_counts(env)
    return counts if env.get("SLURM_NTASKS") == str(sum(counts)) else None


def srun(run: Run) -> tuple[list[str], dict[str, str]]:
    """Returns the srun command that starts one launcher on every node, and its environment variables (none).

    With NEOX_CONTAINER the launchers start in that container, by its interpreter.
    Each launcher gets all of the job's resources on its node, and finds its index in SLURM_NODEID.
    """
    count = str(len(run.nodes))
    words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none"]
    words += ["--kill-on-bad-exit=1", "--wait=60", "--export=ALL"]
    words += [f"--comment={run.args.comment}"] if run.args.comment else []
    words += [f"--account={run.args.account}"] if run.args.account else []
    container = read_container(os.environ)
    python = container.python if container else sys.executable
    launcher_command = [python, "-u", str(install_root() / "deepy.py"), "--hosts", *map(str, run.nodes)]
    launcher_command += ["--master_addr", run.master_addr, "--master_port", str(run.master_port), *run.command[2:]]
    if container:
        words += container.srun_options()
    return [*words, *(container.task(launcher_command) if container else launcher_command)], {}


def for_requeued_start(run: Run, env: Mapping[str, str]) -> Run:
    """Returns the run for this start of the job. If the job was requeued and the run has saved, the keys
    `restart` and `iteration` are removed, because they apply to the first start only.

    The first start leaves a file `slurm-<job>.started` in log_dir. A checkpoint newer than this file shows
    that the run has saved.
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
    """Returns the content of the run's status.json; {} if the file does not exist. If it cannot be read, also
    prints a warning."""
    for _ in range(3):  # another node may have written it a moment ago
        problems = run_files.Problems()
        status = run_files.read_status(Path(args.save_dir or ""), problems)
        if status:
            break
        time.sleep(0.3)
    for line in problems.lines():
        say(f"deepy.py: warning: {line}")
    return status


def job_exit_code(
    args: "NeoXArgs", code: int, stop_requested: bool, status_before: Mapping[str, Any], env: Mapping[str, str]
) -> int:
    """Returns deepy.py's exit code: REQUEUE if USR1 stopped the run after it saved and before it finished,
    else `code`.

    If a requeued start made no progress, returns 1, because a job with too little time would be requeued for
    ever.

    code: exit code of the ranks.
    stop_requested: whether USR1 arrived.
    status_before: `read_status` at the start.
    """
    status = read_status(args)
    if not stop_requested or code != 0 or status.get("status") != "stopped":
        return code
    if _restarts(env) and status.get("iteration") == status_before.get("iteration"):
        say(
            f"deepy.py: error: this start of job {env['SLURM_JOB_ID']} came no further than iteration "
            f"{status.get('iteration')}, where it began; the job is not queued again: give it more time (sbatch --time)"
        )
        return 1
    return REQUEUE


def _restarts(env: Mapping[str, str]) -> int:
    return read_integer(env, "SLURM_RESTART_COUNT", 0)


def _gpus_asked_for(job: str, env: Mapping[str, str]) -> int:
    """Returns the number of GPUs per node that an srun step gets. With --exclusive the batch script itself
    sees all GPUs of the node.

    job: output of `scontrol show job`.
    """
    requested = dict(re.findall(r"TresPer(\w+)=(\S*gpu\S*)", job))
    if "Node" in requested:
        return int((re.search(r"gpu(?:[:/][^,:=]*[A-Za-z][^,:=]*)?[:=](\d+)", requested["Node"]) or [0, 1])[1])
    return read_integer(env, "SLURM_GPUS_ON_NODE", 0) if requested else 0


def to_end_of_line(name: str, job: str) -> str:
    """Returns the value of a field in the output of `scontrol show job`. The value is the rest of the line,
    because it may contain spaces. Returns "" if the field is missing."""
    match = re.search(rf"\b{name}=(.*?)\s*$", job, re.MULTILINE)
    return match[1] if match else ""


def scontrol(*words: str) -> str:
    """Returns the output of `scontrol` with these arguments. Raises LaunchError if the program is missing or
    fails."""
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise LaunchError(
            "scontrol, a program of Slurm, is not on PATH; run deepy.py on a machine with Slurm"
        ) from None
    except subprocess.CalledProcessError as problem:
        raise LaunchError(f"`scontrol {shlex.join(words)}` failed: {problem.stderr.strip()}") from None
