"""The files of a run that other programs read (status.json, training_summary.json, manifests, rows of
metrics.jsonl), the one way to read them, and how numbers are written.

Whoever reads a file of a run trusts nothing in it: the disk may have been full, the writer killed, the file
edited. A value that is not of its kind is dropped, and `Problems` names it; every value that is left can be
calculated with and printed.
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
_LARGEST = 256 << 20  # bytes of a file that is one object; a manifest has a line for each file of a checkpoint
_DEEPEST = 32  # objects and lists within each other
_LONGEST = 10_000  # characters of a text that is shown
_LATEST_S = 1e10  # seconds: the year 2286, or a run of 300 years

Kind = Callable[[Any], Any]
"""Takes a value of JSON and returns it as it is used; raises Unfit for one that is not of this kind."""
Shape = Mapping[str, Kind]
"""The kinds of an object's values by name. Names that it lacks are read by nobody and left out."""


class Unfit(Exception):
    """A value that is not of its kind; the message says what was expected."""


class Problems:
    """What could not be used of files that were read: by file and name, how often, and why at first."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[int, str]] = {}

    def note(self, file: Path, name: str, why: str) -> None:
        """Note one of them. name: of the value; "" where it is the file."""
        count, first = self._found.get((str(file), name), (0, why))
        self._found[str(file), name] = (count + 1, first)

    def lines(self) -> list[str]:
        """A line each: file, name, why."""
        return [
            f"{file}: {name}{': ' if name else ''}{why}{f' ({count} times)' if count > 1 else ''}"
            for (file, name), (count, why) in self._found.items()
        ]


def number(value: Any) -> float | int:
    """A number, which may be NaN or infinite; null, as some programs write NaN, is NaN."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Unfit("a number")
    try:
        float(value)
    except OverflowError:
        raise Unfit("a number that a float holds") from None
    return value


def amount(value: Any) -> float | int:
    """A finite number of at least 0 that a whole number of 64 bits can hold."""
    if not 0 <= number(value) < 2**63:
        raise Unfit("a number of at least 0 and below 2^63")
    return value


def count(value: Any) -> int:
    """A whole number of at least 0, of 64 bits at most."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise Unfit("a whole number of at least 0 and below 2^63")
    return value


def process_number(value: Any) -> int:
    """The number of a process: 0 and negative ones would mean groups of them to the system."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 < value < 2**31:
        raise Unfit("the number of a process")
    return value


def seconds(value: Any) -> float | int:
    """A duration or a moment in seconds that a clock can show."""
    if not 0 <= number(value) < _LATEST_S:
        raise Unfit(f"seconds, at least 0 and below {_LATEST_S:.0e}")
    return value


def text(value: Any) -> str:
    """A text that any terminal and file takes; a very long one is cut."""
    if not isinstance(value, str):
        raise Unfit("a text")
    if len(value) > _LONGEST:
        value = value[:_LONGEST] + "..."
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value)


def one_of(*words: str) -> Kind:
    """One of these words."""

    def read(value: Any) -> str:
        if value not in words:
            raise Unfit(f"one of {', '.join(words)}")
        return str(value)

    return read


def list_of(kind: Kind) -> Kind:
    """A list whose values are all of one kind."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise Unfit("a list")
        return [kind(one) for one in value]

    return read


def each(kind: Kind) -> Kind:
    """An object of any names, whose values are all of one kind."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Unfit("an object")
        return {text(name): kind(one) for name, one in value.items()}

    return read


def whole(shape: Shape) -> Kind:
    """An object that has every name of a shape; it is of use only as a whole."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Unfit("an object")
        if missing := [name for name in shape if value.get(name) is None]:
            raise Unfit(f"an object with {', '.join(missing)}")
        try:
            return {name: kind(value[name]) for name, kind in shape.items()}
        except Unfit as problem:
            raise Unfit(f"an object whose values are numbers and texts as they must be: {problem}") from None

    return read


def tree(value: Any) -> Any:
    """A text or number, or an object of trees."""
    if isinstance(value, dict):
        return {text(name): tree(one) for name, one in value.items()}
    return text(value) if isinstance(value, str) else number(value)


def anything(value: Any) -> Any:
    """Whatever it is: its reader checks it."""
    return value


STATUS_SHAPE: Shape = {
    "status": one_of("running", "finished", "stopped", "failed"), "reason": text, "phase": text, "iteration": count,
    "train_iters": count, "run_id": text, "log_dir": text, "host": text, "device": text, "pid": process_number,
    "launcher_pid": process_number, "job": text, "time": text,
}  # fmt: skip
SUMMARY_SHAPE: Shape = {
    "status": STATUS_SHAPE["status"], "reason": text, "run_id": text, "iteration": count, "train_iters": count,
    "best": whole({"metric": text, "value": number, "iteration": count}), "training_seconds": seconds,
    "wall_clock_seconds": seconds, "tokens_per_sec": number, "world_size": count,
    "parameters": whole({"total": count, "trainable": count, "trainable_share": number}), "skipped_steps": count,
    "precision": text, "objective": text, "layout": each(tree), "effective_batch": each(number),
    "start_weights": text, "versions": each(text), "git_hash": text,
}  # fmt: skip
MANIFEST_SHAPE: Shape = {
    "iteration": count, "consumed_samples": count, "layout": each(tree), "tokenizer": text, "versions": each(text),
    "created": text, "validation_loss": number, "engine": text, "config": each(anything),
    "data": each(anything),
}  # fmt: skip
DATA_SHAPE: Shape = {
    "files": each(tree), "laid_out": each(list_of(list_of(count))), "consumed_sha256": text,
}  # fmt: skip
"""The fields of a manifest's `data` and their kinds."""
ROW_SHAPE: Shape = {
    "iteration": count, "consumed_samples": count, "consumed_tokens": count, "run_id": text,
    "runtime/start_time": seconds, "runtime/iteration_time": seconds, "runtime/restarts": amount,
    "train/skipped_steps": amount, "train/untrained_steps": amount, "train/spikes": amount,
}  # fmt: skip
"""Of a row of metrics.jsonl; every other name is a metric, a `number`."""


def to_json(value: Any, **options: Any) -> str:
    """A value as text of JSON that every program reads: NaN and infinities, for which JSON has no form, are
    null. options: of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_without_nonfinite(value), allow_nan=False, **options)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(one) for name, one in value.items()}
    return [_without_nonfinite(one) for one in value] if isinstance(value, list | tuple) else value


def open_file(path: Path) -> BinaryIO:
    """A file to read. Raises OSError also for what is none, such as a pipe, which would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def parse(data: bytes | str) -> Any:
    """The value of a text of JSON. Raises ValueError for text that is none, and for one nested too deeply."""
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
            raise ValueError(f"nested more than {_DEEPEST} deep")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, with values of any kind. Raises OSError, and ValueError for other text."""
    with open_file(path) as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"larger than {_LARGEST >> 20} MiB")
    value = parse(data)
    if not isinstance(value, dict):
        raise ValueError("holds no object of JSON")
    return value


def read_fields(path: Path, shape: Shape, problems: Problems) -> dict[str, Any]:
    """The values of a JSON file that are of their kinds; {} where there is no file. A file that cannot be
    read is noted and gives {} too."""
    try:
        value = read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        problems.note(path, "", f"cannot be read ({why})")
        return {}
    return fields_of(value, shape, lambda name, why: problems.note(path, name, why))


def read_status(save: Path, problems: Problems) -> dict[str, Any]:
    """status.json of a run by its `save`, as `read_fields`."""
    return read_fields(save / STATUS, STATUS_SHAPE, problems)


def fields_of(
    value: Mapping[str, Any], shape: Shape, note: Callable[[str, str], None], others: Kind | None = None
) -> dict[str, Any]:
    """The values of an object that are of their kinds; null is kept, for it says that a value is not known.

    others: the kind of names that the shape lacks; None: they are left out. note: is told of each value that
    was dropped its name and why.
    """
    fields: dict[str, Any] = {}
    for name, one in value.items():
        kind = shape.get(name, others)
        if kind is None:
            continue
        if one is None and kind is not others:
            fields[name] = None
            continue
        try:
            fields[name] = kind(one)
        except Unfit as expected:
            note(text(name), f"{_shown(one)} is not {expected}; left out")
    return fields


def _shown(value: Any) -> str:
    """A value in few characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    words = text(value) if isinstance(value, str) else str(value)
    quote = '"' if isinstance(value, str) else ""
    return f"{quote}{words[:40]}{'...' if len(words) > 40 else ''}{quote}"
