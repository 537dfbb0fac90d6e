"""Submits one Slurm job per checkpoint of an experiment; each job publishes its checkpoint on the Hub.

python -m megatron.operations.hub.submission EXPERIMENT [org] ...
(huggingface/batch_submit_checkpoints.sh)"""  # noqa: W505 (a line to copy)

import argparse
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.launch.environment import install_root
from megatron.launch.site import checkpoint_folder, site_variables
from megatron.neox_arguments import UserError
from megatron.neox_arguments.values.integers import parse_integer
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.hub import flags
from megatron.operations.hub.checkpoints import find_experiment, steps_in
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.names import checked_id, model_name, neox_repository, read_names, run_name
from megatron.process import begin_process, end_process, run_command
from megatron.process.command_parser import CommandParser

_NAME = "batch_submit_checkpoints.sh"
_HELP = """Publish all checkpoints of an experiment on the HuggingFace Hub: one Slurm job per checkpoint, newest first.

    ./huggingface/batch_submit_checkpoints.sh my-run
    ./huggingface/batch_submit_checkpoints.sh my-run my-org --upload-delay random --skip-neox-upload
    ./huggingface/batch_submit_checkpoints.sh /abs/checkpoints/my-run my-org --dry-run
    squeue -u $USER | grep convert_

Jobs are named convert_EXPERIMENT; jobs of the same name run one at a time. Environment variables of sbatch
apply: SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT. Run the same command again to publish the
checkpoints that are not published yet. docs/hub.md explains the rest."""


@dataclass(frozen=True)
class Chosen:
    """The checkpoints that the command-line flags choose, and the repository for them.

    save: folder of the checkpoints. steps: steps of the chosen checkpoints.
    name: name of the run.
    repository: ORGANISATION/NAME on the Hub.
    site: variables of the site file, overridden by NEOX_* variables of the environment.
    """

    save: Path
    name: str
    steps: tuple[int, ...]
    repository: str
    site: Mapping[str, str]

    @property
    def newest(self) -> Path | None:
        """The folder of the newest chosen checkpoint; None if no checkpoint is chosen."""
        return self.save / f"global_step{max(self.steps)}" if self.steps else None


def target_repository(save: Path, organisation: str | None, site: Mapping[str, str]) -> str:
    """Returns the repository ORGANISATION/NAME for the run that saves in `save`, named by the site's rules.

    organisation: None for the site's NEOX_HUB_ORG. Raises HubError for an invalid name, or if another run of
    the site would get the same name."""
    organisation = organisation or site.get("NEOX_HUB_ORG")
    if not organisation:
        raise HubError(
            "no organisation of the Hub is given; pass it as an argument, or set NEOX_HUB_ORG in the file of your "
            "cluster (slurm/sites)"
        )
    root, names = site.get("NEOX_CHECKPOINT_DIR"), read_names(site.get("NEOX_HUB_NAMES"))

    def name(folder: Path) -> str:
        return model_name(run_name(folder, root), site.get("NEOX_HUB_PREFIX"), names)

    def name_or_none(folder: Path) -> str | None:
        try:
            return name(folder)
        except HubError:  # a run with an invalid name is never published, so it cannot clash
            return None

    chosen = name(save)
    for other_save in _runs_below(root):
        if other_save != save.absolute() and name_or_none(other_save) == chosen:
            text = f"{save.absolute()} and {other_save} would both be {chosen!r} on the Hub"
            raise HubError(f"{text}; give one of them another name in the mapping file of NEOX_HUB_NAMES")
    return checked_id(f"{organisation}/{chosen}", "the repository")


def _runs_below(root: str | None) -> list[Path]:
    """Returns the folders that hold checkpoints (a file `latest`), one to three levels below `root`."""
    if root is None:
        return []
    places = with_home(root).absolute()
    return [path.parent for depth in ("*", "*/*", "*/*/*") for path in sorted(places.glob(f"{depth}/latest"))]


def hub_variables() -> dict[str, str]:
    """Returns the variables of the site file, overridden by non-empty NEOX_* variables of the environment."""
    own_variables = {name: value for name, value in os.environ.items() if name.startswith("NEOX_") and value}
    return {**site_variables(os.environ), **own_variables}


def experiment_of_flags(options: argparse.Namespace, may_be_empty: bool = False) -> Chosen:
    """Returns the checkpoints and the repository that the flags of an upload command choose. Raises HubError.

    may_be_empty: accept checkpoints of --neox_checkpoint that do not exist yet."""
    site = hub_variables()
    site |= {"NEOX_CHECKPOINT_DIR": options.neox_checkpoints_path} if options.neox_checkpoints_path else {}
    save = find_experiment(options.experiment_name, checkpoint_folder(site))
    if options.repository is not None:
        repository = checked_id(options.repository, "--repository")
    else:
        repository = target_repository(save, options.hf_org, site)
    if flags.formats_of(options) != "hf":
        neox_repository(repository)
    name = run_name(save, site.get("NEOX_CHECKPOINT_DIR"))
    if options.neox_checkpoint is None:
        return Chosen(save, name, steps_in(save), repository, site)
    steps = []
    for tag in options.neox_checkpoint:
        step = parse_integer(tag.rstrip("/").rpartition("/")[2].removeprefix("global_step"))
        if step is None or not may_be_empty and not (save / f"global_step{step}").is_dir():
            saved_tags = ", ".join(f"global_step{saved_step}" for saved_step in steps_in(save))
            raise HubError(f"--neox_checkpoint {tag}: no such checkpoint in {save}, which holds {saved_tags}")
        steps.append(step)
    return Chosen(save, name, tuple(steps), repository, site)


def sbatch_lines(options: argparse.Namespace, chosen: Chosen, draw: random.Random) -> list[list[str]]:
    """Returns one sbatch command line for each chosen checkpoint. draw: generator of random delays.

    Raises HubError for flags that do not fit together."""
    tasks, patience = flags.tasks_of(options, chosen.site, chosen.newest), flags.patience_of(options)
    words = ["--experiment_name", str(chosen.save), "--repository", chosen.repository]
    words += {"both": [], "hf": ["--skip-neox-upload"], "neox": ["--upload-neox-only"]}[flags.formats_of(options)]
    words += ["--eval_tasks", *tasks] if tasks else ["--skip-eval"]
    words += ["--force-eval-if-exists"] if tasks and options.force_eval else []
    include = [os.path.abspath(path) for path in options.task_include_path or ()]  # a job begins in another folder
    words += ["--task_include_path", *include] if include else []
    words += ["--eval_limit", f"{options.eval_limit:g}"] if options.eval_limit is not None else []
    values_by_flag = {"tokenizer_hf_path": flags.tokenizer_of(options), "wandb_project": options.wandb_project}
    for flag, value in {**values_by_flag, "wandb_entity": options.wandb_entity}.items():
        words += [f"--{flag}", value] if value else []
    words += ["--max-retries", str(patience.max_retries), "--retry-min-wait", f"{patience.min_wait_s:g}"]
    words += ["--retry-max-wait", f"{patience.max_wait_s:g}"]
    lines = []
    for step, delay in zip(chosen.steps, flags.delays_of(options, len(chosen.steps), draw), strict=True):
        line = ["sbatch", f"--job-name=convert_{chosen.name}"]
        line += [] if options.no_singleton else ["--dependency=singleton"]
        line += [f"--begin=now+{delay}seconds"] if delay else []
        line += ["--gres=gpu:1"] if tasks and "NEOX_GPUS_PER_NODE" in chosen.site else []
        script = install_root() / "huggingface" / "convert_and_upload.sbatch"
        lines.append([*line, str(script), "--neox_checkpoint", f"global_step{step}", *words])
    return lines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog=_NAME, description=_HELP)
    parser.add_argument(
        "experiment_name", metavar="EXPERIMENT", help="a folder below the site's NEOX_CHECKPOINT_DIR, or a path"
    )
    parser.add_argument(
        "hf_org", metavar="org", nargs="?", help="organisation on the Hub (default: the site's NEOX_HUB_ORG)"
    )
    flags.add_place_flags(parser)
    flags.add_delay_flag(parser, "the first job may start, and 30 s more for each later job")
    parser.add_argument(
        "--delay-between-jobs",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="seconds to wait between two calls of sbatch (default: 0)",
    )
    parser.add_argument(
        "--no-singleton", action="store_true", help="let jobs of the experiment run at the same time, not one by one"
    )
    flags.add_format_flags(parser)
    flags.add_tokenizer_flags(parser)
    flags.add_evaluation_flags(parser)
    flags.add_patience_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch commands, submit nothing")
    parser.set_defaults(neox_checkpoint=None, repository=None)
    return parser.parse_intermixed_args(argv)  # the organisation may stand after flags


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        if options.delay_between_jobs < 0:
            raise HubError(f"--delay-between-jobs {options.delay_between_jobs:g}: give seconds, not negative")
        chosen = experiment_of_flags(options)
        lines = sbatch_lines(options, chosen, random.Random())
        print(f"{chosen.name}: publishing {len(lines)} checkpoints to {chosen.repository}", flush=True)
        if options.eval:
            tasks = flags.tasks_of(options, chosen.site, chosen.newest)
            print(f"{chosen.name}: tasks of the evaluation: {' '.join(tasks)}", flush=True)
        for number, line in enumerate(lines):
            if number and not options.dry_run:
                time.sleep(options.delay_between_jobs)
            _submit(line, options.dry_run)
    except UserError as problem:
        sys.stderr.write(problem.error_lines(_NAME))
        return 1
    return 0


def _submit(line: Sequence[str], dry_run: bool) -> None:
    if dry_run:
        print(shlex.join(line), flush=True)
        return
    Path("logs").mkdir(exist_ok=True)  # folder of the job's log; Slurm does not create it
    try:
        done = subprocess.run(line, capture_output=True, text=True)
    except FileNotFoundError:
        raise HubError(
            "this machine has no sbatch; without Slurm, run huggingface/upload_and_evaluate_checkpoint.py instead"
        ) from None
    if done.returncode:
        raise HubError(f"{shlex.join(line)}: {done.stderr.strip()}")
    print(f"{line[line.index('--neox_checkpoint') + 1]}: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    begin_process(_NAME)
    run_command(lambda: end_process(main()))
