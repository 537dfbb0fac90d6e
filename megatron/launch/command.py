"""`neox`, the command of an installed package: every script of a clone by its name, started as `python`
would."""

import ast
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from megatron.launch.environment import LaunchError, install_root
from megatron.process import run_command

# What deepy.py starts on ranks, with the words of `neox --help`.
ON_RANKS = {
    "train": ("train.py", "train a model"),
    "eval": ("eval.py", "score a model on tasks of lm-eval"),
    "generate": ("generate.py", "let a model write"),
    "serve": ("tools/serve.py", "answer OpenAI's API with a model"),
}
_HELP = """\
usage: neox COMMAND ...

  neox quickstart_data                        make the data of the quickstart
  neox train quickstart local_setup           train on it: files of yours, or presets by their names
  neox train --num_gpus 2 a.yml b.yml --set train_iters=100
  neox COMMAND --help                         what a command takes

on the ranks of this machine, or of several (in a clone: python deepy.py train.py ...):
{ranks}
  doctor                             can a run start here?
  --help-config KEY, --diff-config A B

tools (in a clone: python tools/...; a dash may stand for each _):
{tools}

presets and recipes: {presets}
"""


def command() -> NoReturn:
    """Run the `neox` command and end the process."""
    run_command(main)


def main() -> int:
    """Become the script that the command line names; 2 when it names none."""
    words, folder = sys.argv[1:], install_root()
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
    """`neox WORDS` as a line for Python: with deepy.py before it where ranks are started. Raises
    LaunchError."""
    name, *rest = words
    deepy = [sys.executable, str(folder / "deepy.py")]
    if name.startswith("-") or name == "doctor":
        return [*deepy, *words]
    name = name.removesuffix(".py").replace("-", "_")
    if name in ON_RANKS:
        return [*deepy, str(folder / ON_RANKS[name][0]), *rest]
    known_tools = tools(folder)
    if name in known_tools:
        return [sys.executable, str(known_tools[name]), *rest]
    alike = [full for full in known_tools if full.endswith(f"/{name}")]
    if alike:
        raise LaunchError(f"{words[0]} is {' or '.join(alike)}")
    near = get_close_matches(name, [*ON_RANKS, "doctor", *known_tools], 1)
    meant = f"do you mean {near[0]}? " if near else ""
    raise LaunchError(f"{words[0]}: no such command; {meant}`neox --help` lists them")


def tools(folder: Path) -> dict[str, Path]:
    """Every script that runs by itself, by its name; by folder and name where two folders have one of that
    name."""
    places = [*folder.glob("prepare*.py"), *folder.glob("tools/**/*.py"), *folder.glob("huggingface/*.py")]
    left_out = {folder / script for script, _ in ON_RANKS.values()} | set(folder.glob("tools/docs/*"))
    left_out |= {folder / "tools" / "retired.py", *(path for path in places if path.is_symlink())}
    scripts = [path for path in places if path not in left_out and '__name__ == "__main__":' in path.read_text("utf-8")]
    names = [path.stem for path in scripts]
    named = {path.stem if names.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}": path for path in scripts}
    return dict(sorted(named.items()))


def help_text(folder: Path) -> str:
    """What `neox --help` prints, with the first sentence of every tool's own description."""
    ranks = "\n".join(f"  {name:<34} {what}" for name, (_, what) in ON_RANKS.items())
    listed = "\n".join(f"  {name:<34} {_summary(path)}" for name, path in tools(folder).items())
    return _HELP.format(ranks=ranks, tools=listed, presets=f"{folder / 'configs'}, {folder / 'post-training'}")


def _summary(path: Path) -> str:
    """The first sentence of a script's description."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")
