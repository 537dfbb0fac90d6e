"""Reads and checks the JSON files of a run: status.json, training_summary.json, manifests and metrics.jsonl.

Their content is not trusted, because the disk may have been full, the writer killed or the file edited. A
value of the wrong type is dropped and noted in `Problems`. Every remaining value can be used in computations
and printed.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

STATUS, SUMMARY = "status.json", "training_summary.json"
_LARGEST = 256 << 20  # most bytes of a file of one JSON object; a manifest lists all files of a checkpoint
_DEEPEST = 32  # most levels of nested objects and lists
_LONGEST = 10_000  # most characters of a text
_LATEST_S = 1e10  # most seconds: a time in the year 2286, or a duration of 300 years

Kind = Callable[[Any], Any]
"""A function that checks a JSON value: it returns the value, possibly converted, or raises Unfit."""
Shape = Mapping[str, Kind]
"""{name: the check for the value under this name in a JSON object}. Values under other names are left out."""


class Unfit(Exception):
    """Raised for a value of the wrong type. The message names what was expected, such as "a number"."""


class Problems:
    """Collects reports of unusable values in files. For each file and name it keeps the number of occurrences
    and the first reason."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], tuple[int, str]] = {}

    def note(self, file: Path, name: str, reason: str) -> None:
        """Records that a value in `file` cannot be used. name: the name of the value; "" for the whole
        file."""
        count, first_reason = self._entries.get((str(file), name), (0, reason))
        self._entries[str(file), name] = (count + 1, first_reason)

    def lines(self) -> list[str]:
        """Returns a line of text for each file and name that was noted: the first reason, and how often."""
        return [
            f"{file}: {name}{': ' if name else ''}{reason}{f' ({count} times)' if count > 1 else ''}"
            for (file, name), (count, reason) in self._entries.items()
        ]


def number(value: Any) -> float | int:
    """Returns `value` if it is a number, which may be NaN or infinite. Raises Unfit for other values.

    null (None) becomes NaN, because some programs write NaN as null.
    """
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Unfit("a number")
    try:
        float(value)
    except OverflowError:
        raise Unfit("a number in the range of a float") from None
    return value


def amount(value: Any) -> float | int:
    """Returns `value` if it is a number of at least 0 and below 2^63. Raises Unfit for any other value."""
    if not 0 <= number(value) < 2**63:
        raise Unfit("a number of at least 0 and below 2^63")
    return value


def count(value: Any) -> int:
    """Returns `value` if it is an integer of at least 0 and below 2^63. Raises Unfit for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise Unfit("a whole number of at least 0 and below 2^63")
    return value


def process_number(value: Any) -> int:
    """Returns `value` if it is a process id above 1 and below 2^31. Raises Unfit for any other value: to
    `os.kill`, 0 and negative ids mean process groups."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 < value < 2**31:
        raise Unfit("a process id")
    return value


def seconds(value: Any) -> float | int:
    """Returns `value` if it is a duration or time in seconds that can be converted to a date. Raises Unfit
    for any other value."""
    if not 0 <= number(value) < _LATEST_S:
        raise Unfit(f"a number of seconds, at least 0 and below {_LATEST_S:.0e}")
    return value


def text(value: Any) -> str:
    """Returns the text `value`, truncated to _LONGEST characters, with unprintable characters replaced by
    U+FFFD. Raises Unfit if `value` is not a text."""
    if not isinstance(value, str):
        raise Unfit("a text")
    if len(value) > _LONGEST:
        value = value[:_LONGEST] + "..."
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value)


def one_of(*words: str) -> Kind:
    """Returns a check that accepts only the texts in `words`: it returns such a value and raises Unfit for
    others."""

    def read(value: Any) -> str:
        if value not in words:
            raise Unfit(f"one of {', '.join(words)}")
        return str(value)

    return read


def list_of(kind: Kind) -> Kind:
    """Returns a check that accepts lists: it applies the check `kind` to each item and returns the list of
    results. It raises Unfit for other values."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise Unfit("a list")
        return [kind(item) for item in value]

    return read


def map_of(kind: Kind) -> Kind:
    """Returns a check that accepts JSON objects: it applies the check `kind` to each value and returns the
    object of results. It raises Unfit for other values."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Unfit("an object")
        return {text(name): kind(item) for name, item in value.items()}

    return read


def complete(shape: Shape) -> Kind:
    """Returns a check that accepts JSON objects: it returns the checked values under the names in `shape`. It
    raises Unfit if one of these names is missing or its value is invalid."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Unfit("an object")
        if missing := [name for name in shape if value.get(name) is None]:
            raise Unfit(f"an object with the names {', '.join(missing)}")
        values = {}
        for name, kind in shape.items():
            try:
                values[name] = kind(value[name])
            except Unfit as problem:
                raise Unfit(f'an object whose "{name}" is {problem}') from None
        return values

    return read


def tree(value: Any) -> Any:
    """Returns `value` if it is a text, a number, or a JSON object that holds only such values at any depth.
    Raises Unfit for any other value."""
    if isinstance(value, dict):
        return {text(name): tree(item) for name, item in value.items()}
    return text(value) if isinstance(value, str) else number(value)


def any_value(value: Any) -> Any:
    """Returns `value` unchanged and unchecked. The caller has to check it."""
    return value


STATUS_SHAPE: Shape = {
    "status": one_of("running", "finished", "stopped", "failed"), "reason": text, "phase": text, "iteration": count,
    "train_iters": count, "run_id": text, "log_dir": text, "host": text, "device": text, "pid": process_number,
    "launcher_pid": process_number, "job": text, "time": text,
}  # fmt: skip
SUMMARY_SHAPE: Shape = {
    "status": STATUS_SHAPE["status"], "reason": text, "run_id": text, "iteration": count, "train_iters": count,
    "best": complete({"metric": text, "value": number, "iteration": count}), "training_seconds": seconds,
    "wall_clock_seconds": seconds, "tokens_per_sec": number, "world_size": count,
    "parameters": complete({"total": count, "trainable": count, "trainable_share": number}), "skipped_steps": count,
    "precision": text, "objective": text, "layout": map_of(tree), "effective_batch": map_of(number),
    "start_weights": text, "versions": map_of(text), "git_hash": text,
}  # fmt: skip
MANIFEST_SHAPE: Shape = {
    "iteration": count, "consumed_samples": count, "layout": map_of(tree), "tokenizer": text, "versions": map_of(text),
    "created": text, "validation_loss": number, "engine": text, "config": map_of(any_value),
    "data": map_of(any_value),
}  # fmt: skip
DATA_SHAPE: Shape = {
    "files": map_of(tree), "laid_out": map_of(list_of(list_of(count))), "consumed_sha256": text,
}  # fmt: skip
"""The fields of `data` in a checkpoint's manifest, and the check of each."""
ROW_SHAPE: Shape = {
    "iteration": count, "consumed_samples": count, "consumed_tokens": count, "run_id": text,
    "runtime/start_time": seconds, "runtime/iteration_time": seconds, "runtime/restarts": amount,
    "train/skipped_steps": amount, "train/untrained_steps": amount, "train/spikes": amount,
}  # fmt: skip
"""The fields of a row of metrics.jsonl that are not plain metrics, and the check of each. Other values are
numbers."""


def to_json(value: Any, **options: Any) -> str:
    """Returns `value` as standard JSON, with NaN and infinities as null. options: passed to `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_without_nonfinite(value), allow_nan=False, **options)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(item) for name, item in value.items()}
    return [_without_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading in binary mode. Raises OSError for a pipe or device, because reading
    from it could block for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def parse(data: bytes | str) -> Any:
    """Parses a JSON text and returns its value. Raises ValueError if the JSON is invalid or nested too
    deeply."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level, depth = [value], 0
    while level := [
        inner for outer in level if isinstance(outer, dict | list)
        for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]:  # fmt: skip
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, with unchecked values.

    Raises OSError if the file cannot be read, and ValueError if it is too large, invalid JSON or not a JSON
    object.
    """
    with open_file(path) as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"larger than {_LARGEST >> 20} MiB")
    value = parse(data)
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def read_fields(path: Path, shape: Shape, problems: Problems) -> dict[str, Any]:
    """Returns the values of the JSON object in a file that pass the checks in `shape`; {} if there is no such
    file.

    Invalid values are left out and noted in `problems`. A file that cannot be read is noted too, and gives
    {}.
    """
    try:
        value = read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        problems.note(path, "", f"cannot be read ({reason})")
        return {}
    return fields_of(value, shape, lambda name, reason: problems.note(path, name, reason))


def read_status(save: Path, problems: Problems) -> dict[str, Any]:
    """Returns the valid values of status.json in a run's folder `save`; {} if there is no such file."""
    return read_fields(save / STATUS, STATUS_SHAPE, problems)


def fields_of(
    value: Mapping[str, Any], shape: Shape, note: Callable[[str, str], None], default: Kind | None = None
) -> dict[str, Any]:
    """Returns the values of a JSON object that pass the checks in `shape`. A null under a name in `shape` is
    kept: it means that the value is unknown.

    note: called with the name of each value that fails its check, and the reason.
    default: the check for names that are not in `shape`; None: such names are left out.
    """
    fields: dict[str, Any] = {}
    for name, item in value.items():
        kind = shape.get(name, default)
        if kind is None:
            continue
        if item is None and kind is not default:
            fields[name] = None
            continue
        try:
            fields[name] = kind(item)
        except Unfit as expected:
            note(text(name), f"{_short_text(item)} is not {expected}; left out")
    return fields


def _short_text(value: Any) -> str:
    """Returns a short description of a value for messages, such as `a list of 3` or the first 40
    characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    words = text(value) if isinstance(value, str) else str(value)
    quote = '"' if isinstance(value, str) else ""
    return f"{quote}{words[:40]}{'...' if len(words) > 40 else ''}{quote}"
