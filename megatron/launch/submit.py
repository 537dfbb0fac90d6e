"""Submits a Slurm job again, with the number of nodes that its site sets for this kind of run.

    python -m megatron.launch.submit /abs/config.yml ... [--set KEY=VALUE ...]      (in a job of pretrain_neox.sbatch)

sbatch reads only the #SBATCH lines of a batch file, which are the same at every site. So a job that was
submitted without --nodes submits itself once more with the site's number of nodes, and ends.
"""  # noqa: W505 (lines to copy)

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from megatron.launch.environment import LaunchError, read_integer
from megatron.launch.site import site_nodes, site_variables, starts_from_a_model
from megatron.launch.slurm import scontrol, tasks_asked_for, to_end_of_line
from megatron.neox_arguments import ConfigError
from megatron.neox_arguments.reading.command_line import parse_deepy
from megatron.process import run_command

GO_ON = 3  # exit code: this job is not submitted again, and slurm/job.sh starts the run
# Variable in the environment of a job that another job submitted: the id of that other job
SUBMITTING_JOB = "NEOX_SUBMITTED_BY"
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")  # the other SLURM_* variables are this job's
_BATCH = Path(__file__).resolve().parents[2] / "pretrain_neox.sbatch"
# Fields of `scontrol show job`, and the sbatch options that set them (on the command line or by SBATCH_*
# variables)
_CARRIED = {
    "Account": "account", "CPUs/Task": "cpus-per-task", "Comment": "comment", "ExcNodeList": "exclude",
    "Features": "constraint", "Licenses": "licenses", "MailType": "mail-type", "MailUser": "mail-user",
    "MinMemoryCPU": "mem-per-cpu", "MinMemoryNode": "mem", "Nice": "nice", "Partition": "partition", "QOS": "qos",
    "Reservation": "reservation", "TimeLimit": "time",
}  # fmt: skip
_UNSET = {"", "(null)", "N/A", "UNLIMITED", "Partition_Limit"}
_DEFAULT = {"CPUs/Task": "1", "MinMemoryNode": "0", "Nice": "0"}


def has_nodes_option(env: Mapping[str, str]) -> bool:
    """Returns whether a job of pretrain_neox.sbatch was submitted with --nodes, or with a number of tasks.

    A number of tasks in the environment shows this. The batch file sets --sockets-per-node=1, but neither
    nodes nor tasks, so sbatch sets a number of tasks (one per node) only if --nodes is on its command line
    (tried with Slurm 22.05 and 24.11).
    """
    return read_integer(env, "SLURM_JOB_NUM_NODES", 1) > 1 or tasks_asked_for(env) is not None


def resubmit_command(job: str, nodes: int, words: Sequence[str], logs: Mapping[str, str]) -> list[str]:
    """Returns the sbatch command that submits a job again with `nodes` nodes and otherwise the same options.

    job: output of `scontrol show job`.
    words: arguments of the batch script.
    logs: paths of the job's log files, by the names `output` and `error`.

    `scontrol show job` does not show --signal and --switches; sbatch reads them from the batch file again.
    """
    fields = dict(re.findall(r"(?:^|\s)([A-Z][A-Za-z/]+)=(\S*)", job))
    fields |= {name: line for name in ("JobName", "Comment") if (line := to_end_of_line(name, job))}
    options = [f"--job-name={fields['JobName']}", f"--nodes={nodes}"]
    for name, option in _CARRIED.items():
        value = fields.get(name, "")
        if value not in _UNSET and value != _DEFAULT.get(name):
            options.append(f"--{option}={value}")
    gpus = re.findall(r"gres[:/]([^,]+)", fields.get("TresPerNode", ""))
    options.append(f"--gres={','.join(gpus) or 'none'}")
    options += ["--no-requeue"] if fields.get("Requeue") == "0" else []
    for option, file in logs.items():
        folder, name = os.path.split(file)
        pattern = re.sub(rf"(?<!\d){fields['JobId']}(?!\d)", "%j", name.replace("%", "%%"))
        options.append(f"--{option}={os.path.join(folder.replace('%', '%%'), pattern)}")
    script = fields.get("Command", "")
    return ["sbatch", "--export=ALL", *options, script if Path(script).is_file() else str(_BATCH), *words]


def main(words: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Submits this job again if it was submitted without --nodes and its site sets another number of nodes.

    Returns the exit code: 0 after submitting, 1 after an error, GO_ON if this job can start the run.
    """
    if SUBMITTING_JOB in env or "SLURM_ARRAY_JOB_ID" in env or has_nodes_option(env):
        return GO_ON
    try:
        from_model = "--hf-model" in words
        if not from_model:  # report a wrong configuration now, not after the job has waited for its nodes
            from_model = starts_from_a_model(parse_deepy(["train.py", *words]).args.check_training())
        files = list(takewhile(lambda word: not word.startswith("-"), words))
        nodes, kind = site_nodes(from_model, files, site_variables(env))
        if nodes is None or nodes == read_integer(env, "SLURM_JOB_NUM_NODES", 1):
            return GO_ON
        _say(f"no --nodes: {kind} has {nodes} nodes at site {env['NEOX_SITE']}")
        _submit(nodes, words, env)
    except (ConfigError, LaunchError) as problem:
        for line in str(problem).splitlines():
            _say(f"error: {line}")
        return 1
    return 0


def _submit(nodes: int, words: Sequence[str], env: Mapping[str, str]) -> None:
    number = env["SLURM_JOB_ID"]
    job = scontrol("show", "job", number)
    logs = {name: os.readlink(f"/proc/self/fd/{fd}") for fd, name in ((1, "output"), (2, "error"))}
    command = resubmit_command(job, nodes, words, _files(logs))
    # Were this job started anew by Slurm, it would submit itself a second time.
    scontrol("update", f"JobId={number}", "Requeue=0")
    _say(shlex.join(command))
    kept_names = (name for name in env if not name.startswith("SLURM_") or name in _CLUSTER_VARIABLES)
    job_env = {**{name: env[name] for name in kept_names}, SUBMITTING_JOB: number}
    try:
        subprocess.run(command, check=True, env=job_env, cwd=to_end_of_line("WorkDir", job) or None)
    except OSError as problem:
        raise LaunchError(
            f"this job cannot submit itself again: sbatch cannot be started on this node ({problem.strerror}); "
            "submit the job with --nodes"
        ) from None
    except subprocess.CalledProcessError:
        raise LaunchError(
            "sbatch refused the job (its message is above); submit the job yourself with --nodes and these options"
        ) from None


def _files(logs: Mapping[str, str]) -> dict[str, str]:
    """Returns the entries of `logs` that are files, without `error` if it is the same file as `output`."""
    files = {name: file for name, file in logs.items() if file.startswith("/") and not file.startswith("/dev/")}
    if files.get("error") == files.get("output"):
        files.pop("error", None)
    return files


def _say(line: str) -> None:
    sys.stdout.write(f"pretrain_neox.sbatch: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
