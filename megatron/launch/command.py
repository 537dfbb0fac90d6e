"""The command `neox` of an installed package. It runs each script of a clone by its name: `neox train
a.yml`."""

import ast
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from megatron.launch.environment import LaunchError, install_root
from megatron.process import run_command
from megatron.process.command_parser import CommandParser
from megatron.process.completion import is_completing, skip_word, typed_words

# Scripts that deepy.py starts on ranks, by command, each with its summary in `neox --help`.
ON_RANKS = {
    "train": ("train.py", "train a model"),
    "eval": ("eval.py", "evaluate a model on lm-eval tasks"),
    "generate": ("generate.py", "generate text with a model"),
    "serve": ("tools/serve.py", "serve a model over OpenAI's API"),
}
# Commands of deepy.py itself, each with its summary.
DEEPY = {
    "finetune": "fine-tune a HuggingFace model on a file",
    "chat": "talk to a model",
    "plan": "tell what a run needs, and how long it takes",
    "branch": "start a run from a checkpoint of another one",
    "pipeline": "run stages with gates between them",
    "sweep": "train variants of a run, and compare them",
    "compare": "compare runs: keys, curves, speed, scores",
    "doctor": "check whether a run can start here",
}
_HELP = """\
usage: neox COMMAND ...

  neox quickstart_data                        make the data of the quickstart
  neox train quickstart local_setup           train on it: your own files, or presets by their names
  neox train --num_gpus 2 a.yml b.yml --set train_iters=100
  neox finetune MODEL DATA                    fine-tune a HuggingFace model
  neox COMMAND --help                         print the arguments of a command

on the ranks of this machine, or of several (in a clone: python deepy.py train.py ...):
{ranks}
{deepy}
  --help-config KEY, --diff-config A B

tools (in a clone: python tools/...; a dash may stand for each _):
{tools}

presets and recipes: {presets}
"""


def command() -> NoReturn:
    """Runs the command `neox` and ends the process."""
    run_command(main)


def main() -> int:
    """Replaces this process by the script that the command line names (`os.execv`).

    Returns only if no script is started: 0 after printing the help, 2 for an unknown command.
    """
    words, folder = sys.argv[1:], install_root()
    if is_completing():
        words = typed_words()
        if not words:
            parser = CommandParser(prog="neox")
            parser.add_argument("command", choices=[*ON_RANKS, *DEEPY, *tools(folder)])
            parser.parse_args([])
        if words[0] not in (*ON_RANKS, *DEEPY):
            skip_word()
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text(folder))
        return 0
    try:
        command = script_line(words, folder)
    except LaunchError as problem:
        sys.stderr.write(f"neox: error: {problem}\n")
        return 2
    sys.stdout.flush()
    os.execv(command[0], command)


def script_line(words: Sequence[str], folder: Path) -> list[str]:
    """Returns the command that runs `neox WORDS`: Python, then deepy.py if the script needs ranks, then the
    script and its arguments.

    words: the words after `neox`; the first one names the script.
    folder: `install_root()`.

    Raises LaunchError for an unknown or ambiguous name.
    """
    name, *arguments = words
    deepy = [sys.executable, str(folder / "deepy.py")]
    if name.startswith("-") or name in DEEPY:
        return [*deepy, *words]
    name = name.removesuffix(".py").replace("-", "_")
    if name in ON_RANKS:
        return [*deepy, str(folder / ON_RANKS[name][0]), *arguments]
    known_tools = tools(folder)
    if name in known_tools:
        return [sys.executable, str(known_tools[name]), *arguments]
    matches = [full for full in known_tools if full.endswith(f"/{name}")]
    if matches:
        raise LaunchError(f"{words[0]}: several tools have this name; write {' or '.join(matches)}")
    nearest = get_close_matches(name, [*ON_RANKS, *DEEPY, *known_tools], 1)
    hint = f"do you mean {nearest[0]}? " if nearest else ""
    raise LaunchError(f"{words[0]}: no such command; {hint}`neox --help` lists all commands")


def tools(folder: Path) -> dict[str, Path]:
    """Returns the path of each script in `folder` that runs without deepy.py, by its name. If two scripts
    share a name, both are listed as `FOLDER/NAME`."""
    places = [*folder.glob("prepare*.py"), *folder.glob("tools/**/*.py"), *folder.glob("huggingface/*.py")]
    left_out = {folder / script for script, _ in ON_RANKS.values()} | set(folder.glob("tools/docs/*"))
    left_out |= {folder / "tools" / "retired.py", *(path for path in places if path.is_symlink())}
    scripts = [path for path in places if path not in left_out and '__name__ == "__main__":' in path.read_text("utf-8")]
    names = [path.stem for path in scripts]
    paths = {path.stem if names.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}": path for path in scripts}
    return dict(sorted(paths.items()))


def help_text(folder: Path) -> str:
    """Returns the text of `neox --help`, with the first sentence of every tool's own description."""
    deepy_lines = "\n".join(f"  {name:<34} {summary}" for name, summary in DEEPY.items())
    ranks = "\n".join(f"  {name:<34} {summary}" for name, (_, summary) in ON_RANKS.items())
    tool_lines = "\n".join(f"  {name:<34} {_summary(path)}" for name, path in tools(folder).items())
    presets = f"{folder / 'configs'}, {folder / 'post-training'}"
    return _HELP.format(ranks=ranks, deepy=deepy_lines, tools=tool_lines, presets=presets)


def _summary(path: Path) -> str:
    """Returns the first sentence of a script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")
