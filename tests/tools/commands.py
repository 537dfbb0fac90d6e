"""Commands of tools/ as they are typed, in this process or on ranks of the pool."""

import importlib
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from tests.pool import run_ranks


def run_tool(main: Callable[[list[str]], Any], *words: object) -> None:
    main([str(word) for word in words])


def refused(main: Callable[[list[str]], Any], *words: object) -> str:
    """Returns the message a command exits with."""
    with pytest.raises(SystemExit) as exit_info:
        run_tool(main, *words)
    assert isinstance(exit_info.value.code, str)
    return exit_info.value.code


def on_ranks(tool: str, *argv: str, ranks: int = 1, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of rank 0 of a command that makes its process group."""
    return run_ranks(_command, ranks, tool, argv, stdin, init=False)[0]


def _command(rank: int, world_size: int, tool: str, argv: Sequence[str], stdin: str) -> tuple[int, str, str]:
    out, err, sys.stdin = io.StringIO(), io.StringIO(), io.StringIO(stdin)
    with redirect_stdout(out), redirect_stderr(err):
        code = importlib.import_module(tool).main(argv)
    return code, out.getvalue(), err.getvalue()
