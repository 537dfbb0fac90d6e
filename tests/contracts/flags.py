"""Prints the flags of every command. Runs as a program, since it replaces how commands parse."""

import argparse
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import megatron.process
from megatron.process.command_parser import CommandParser

ROOT = Path(__file__).resolve().parents[2]
# Commands for people who change this code; their flags are no contract.
DEVELOPERS = ("tests/", "benchmarks/", "tools/docs/", "tools/lint/", "tools/compare_commits.py", "configs/")


class Parsed(BaseException):
    """Ends a command where it would read its words."""

    def __init__(self, parser: CommandParser) -> None:
        self.parser = parser


def commands() -> Iterator[str]:
    """Paths of the programs that have a parser."""
    for path in sorted({*ROOT.glob("*.py"), *ROOT.glob("*/**/*.py")}):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8") if not name.startswith((".", *DEVELOPERS)) else ""
        if re.search(r'^if __name__ == "__main__":\n', text, re.MULTILINE) and "run_command(" in text:
            yield name


def flags(parser: Any, name: str) -> Iterator[str]:
    """A line for each flag, with its values and default; then those of subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from flags(inner, f"{name} {word}")
        elif action.dest != "help":
            spelled = " ".join(action.option_strings) or action.metavar or action.dest
            default = "" if action.default in (None, False, argparse.SUPPRESS) else f" = {action.default!r}"
            choices = "" if action.choices is None else f" {{{','.join(map(str, action.choices))}}}"
            yield f"{name}: {spelled}{choices} {action.nargs or ''}".rstrip() + default


def parser_of(name: str) -> CommandParser | None:
    """Runs a program until it parses its command line, and returns the parser; None if it only ends."""
    sys.argv = [name]
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            runpy.run_path(str(ROOT / name), run_name="__main__")
    except Parsed as ending:
        return ending.parser
    except SystemExit:  # a script of GPT-NeoX, which names the command to use instead
        pass
    return None


def main() -> None:
    def end(parser: CommandParser, *_: Any) -> NoReturn:
        raise Parsed(parser)

    CommandParser.parse_known_args = CommandParser.parse_known_intermixed_args = end  # type: ignore[assignment]
    megatron.process.run_command = lambda program: program()  # type: ignore[assignment,return-value]
    for name in commands():
        parser = parser_of(name)
        lines = [f"{name}: no flags"] if parser is None else list(flags(parser, name))
        for line in lines:
            sys.stdout.write(line.replace(sys.executable, "PYTHON").replace(str(ROOT), "ROOT") + "\n")


if __name__ == "__main__":
    main()
