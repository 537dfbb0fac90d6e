"""Errors that a user can fix: their base class, the error of configurations, and a collector of problems."""

import errno
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.frozen import thaw

_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
_MAX_LINE = 2000
_LFS_POINTER = b"version https://git-lfs"


def disk_problem(problem: BaseException | None) -> str | None:
    """Returns `FILE: reason` if an error, or one of its causes, comes from a file that cannot be written;
    else None.

    HuggingFace's libraries hide such a failure: they report that data is not available.
    """
    while problem is not None:
        if isinstance(problem, OSError) and problem.errno in _DISK and problem.filename:
            return f"{problem.filename}: {problem.strerror}"
        problem = problem.__cause__ or problem.__context__
    return None


def lfs_pointer_error(path: str | PathLike[str]) -> str | None:
    """Returns an error message if the file is a git-lfs pointer, else None.

    git-lfs leaves a pointer in place of a file that it has not fetched.
    """
    with open(path, "rb") as file:
        if file.read(len(_LFS_POINTER)) != _LFS_POINTER:
            return None
    return f"{path}: is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder"


class UserError(Exception):
    """An error that a user can fix. Commands print its message, one line for each problem, without a
    traceback.

    This module imports little, so that a command can catch the error without importing torch first.

    exit_code: of a training run that ends by the error. `deepy.py` takes 1 for a refusal, which it does not
        start again.
    """

    exit_code = 1

    def __str__(self) -> str:
        """Returns the message without secrets, because libraries put full URLs with signatures into
        messages."""
        return without_secrets(super().__str__())

    def error_lines(self, command: str) -> str:
        """Returns the message as `command` prints it: `train.py: error: ...`, one line for each problem.

        The middle of a line is left out if the line is very long, as with a name of 5,000 characters.
        """
        return "".join(f"{command}: error: {_with_short_middle(line)}\n" for line in str(self).splitlines())


def _with_short_middle(line: str) -> str:
    omitted = len(line) - _MAX_LINE
    return line if omitted <= 0 else f"{line[: _MAX_LINE // 2]} [{omitted} characters] {line[-_MAX_LINE // 2 :]}"


_MOST_LINES = 50  # a file that is there twice repeats every key


class ConfigError(UserError, ValueError):
    """Raised if a configuration cannot be used. Its message has a line for each problem: place, key, reason.

    Of very many problems the first ones are in the message; `problems` has all.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        left_out = len(self.problems) - _MOST_LINES
        last_line = (f"and {left_out} more problems",) if left_out > 0 else ()
        super().__init__("\n".join((*self.problems[:_MOST_LINES], *last_line)))

    def __reduce__(self):
        return ConfigError, (self.problems,)


class ErrorCollector:
    """Collects the problems of a configuration, so that all of them are reported together.

    A line reads `a.yml:12: num_layers: expected int, got "twelve"`.
    """

    def __init__(self, origins: Mapping[str, str]) -> None:
        self.origins = origins
        self.lines: list[str] = []
        self.complete = True  # False if a file could not be read: it may hold keys that seem missing.

    def origin(self, path: str) -> str | None:
        """Returns where a dotted path, or the nearest section that contains it, was set, such as `a.yml:12`.
        None if it was not set."""
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path)

    def add(self, path: str, text: str) -> None:
        """Adds a problem of the key at a dotted path such as `optimizer.params.lr`, with the place where it
        was set."""
        origin = self.origin(path)
        self.lines.append(f"{origin}: {path}: {text}" if origin else f"{path}: {text}")

    def raise_if_any(self) -> None:
        """Raises ConfigError with all problems added so far, if there are any."""
        if self.lines:
            raise ConfigError(self.lines)


def format_value(value: Any) -> str:
    """Formats a value for messages: text in quotes, other values as YAML writes them."""
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(thaw(value)) if isinstance(value, Mapping | list | tuple) else str(value)
