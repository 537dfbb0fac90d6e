"""Runs `python deepy.py branch RUN@STEP new.yml`: a new run from a checkpoint of another one."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron.data.files import replace_text, write_json
from megatron.experiments.branch import CONFIG, Branch, plan_branch
from megatron.experiments.errors import RunError
from megatron.experiments.lineage import PARENT_FILE, tree_lines, words_of
from megatron.neox_arguments import UserError
from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.reading.command_line import DeepyCommand, parse_branch
from megatron.neox_arguments.values.local_paths import with_home
from megatron.training.checkpoint.pieces import lock_folder

_COMMAND = "deepy.py branch"
_DESCRIPTION = (
    "Start a new run from a checkpoint of another one, with the other run's configuration and new keys on top. "
    "RUN is its folder of checkpoints (save), STEP a step or latest. All flags of a training run may follow."
)
_EXAMPLES = """\
examples:
  python deepy.py branch checkpoints/base@20000 decay.yml --set save=checkpoints/base-decay
  python deepy.py branch checkpoints/base@latest --set save=checkpoints/b optimizer.params.lr=1e-4 --dry-run
  python deepy.py branch --tree checkpoints/base-decay

The first lines say where the data go on, and whether schedule and optimizer do. Typed again, the command goes
on with the branch's own checkpoints.
"""


def main(argv: Sequence[str], preset_root: Path, carry_out: Callable[[DeepyCommand], int]) -> int:
    """Starts the branch that the command line names. Returns the exit code.

    carry_out: starts a training run, or prints what the command line asks for.
    """
    try:
        words = parse_branch(argv, preset_root, _EXAMPLES, _DESCRIPTION)
        if words.tree is not None:
            print("\n".join(tree_lines(with_home(words.tree))))
            return 0
        if not words.source:
            raise RunError("name the checkpoint from which the branch begins: RUN@STEP")
        branch = plan_branch(words.source, words.assignments)
        branch.args.check_training()
        command = words.command(preset_root / "train.py", branch.save / CONFIG, branch.args)
        only_shows = command.print_config or command.print_schedule or command.dry_run
        _say(branch, sys.stderr if only_shows else sys.stdout)
        if not only_shows:
            write_branch(branch)
        return 0 if words.parsed.prepare_only else carry_out(command)
    except UserError as problem:
        sys.stderr.write(problem.error_lines(_COMMAND))
    except OSError as problem:  # a file or folder cannot be read or written
        if problem.filename is None:
            raise
        sys.stderr.write(RunError(f"{problem.filename}: {problem.strerror}").error_lines(_COMMAND))
    return 1


def _say(branch: Branch, stream: TextIO) -> None:
    lines = [*branch.lines]
    for words in words_of((branch.args.branched_from or {}).get("changed")):
        lines.append(f"differs: {words}")
    for line in lines:
        print(f"branch: {without_secrets(line)}", file=stream, flush=True)


def write_branch(branch: Branch) -> None:
    """Write the files of a new branch into its folder: first its configuration, then parent.json.

    Raises CheckpointError if a run writes to the folder, because it would take over other settings.
    """
    if branch.record is None or branch.config is None:
        return
    with lock_folder(branch.save):
        _write_files(branch.save, branch.record, branch.config)


def _write_files(save: Path, record: Mapping[str, Any], config: str) -> None:
    if without_secrets(config) != config:  # only the user may read passwords of URLs
        (save / CONFIG).touch(0o600)
        os.chmod(save / CONFIG, 0o600)
        (save / CONFIG).write_text(config, encoding="utf-8")
    else:
        replace_text(save / CONFIG, config)
    write_json(save / PARENT_FILE, record)
