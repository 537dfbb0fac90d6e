"""Example commands in the docstrings of scripts, which --help shows: each is whole and can be copied."""

import ast
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STARTERS = ("python", "torchrun", "sbatch", "eval", "pytest")


def scripts() -> list[Path]:
    folders = (ROOT, ROOT / "huggingface", ROOT / "tools", *(ROOT / "tools").glob("*/"))
    names = ("experiments/sweep_command.py", "pipelines/command.py", "tokenizer/train_tokenizer.py")
    in_megatron = [ROOT / "megatron" / name for name in names]
    return [*in_megatron, *(file for folder in folders for file in sorted(folder.glob("*.py")))]


def commands(docstring: str) -> list[str]:
    """Returns the commands of indented blocks, one per line. Lines that end in a backslash are joined."""
    paragraphs = docstring.replace("\\\n", " ").split("\n\n")
    blocks = [lines for text in paragraphs if (lines := [line for line in text.split("\n") if line.startswith("    ")])]
    return [line.strip() for lines in blocks if lines[0].strip().startswith(STARTERS) for line in lines]


def problem(command: str) -> str | None:
    words = shlex.split(command, comments=True)
    starts = [word for word in words if word in STARTERS]
    program = next((word for word in words if "=" not in word), "")
    if program not in STARTERS and not program.startswith(("./", "$")):
        return "begins with no program"
    if len(starts) > 1 or any(word.startswith(" ") for word in words):
        return "two lines in one"
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None and not (ROOT / script).is_file():
        return f"{script} does not exist"
    return None


def test_examples_can_be_copied() -> None:
    examples = {
        command: script
        for script in scripts()
        for command in commands(ast.get_docstring(ast.parse(script.read_text())) or "")
    }
    assert len(examples) > 40
    wrong = {f"{script.relative_to(ROOT)}: {command}": mistake for command, script in examples.items()
             if (mistake := problem(command)) is not None}  # fmt: skip
    assert not wrong


@pytest.mark.parametrize("command", [
    "--tp 2", "python tools/jobs.py list --since python tools/jobs.py logs 4711", "tokenizer.json",
    "python tools/ckpts/reshard.py raw \\ --tp 2", "python tools/ckpts/no_such.py",
])  # fmt: skip
def test_broken_lines_are_seen(command: str) -> None:
    assert problem(command) is not None
