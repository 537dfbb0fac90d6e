"""Converts plain data to JSON and back, for a program and its tests in two processes (`remote_objects.py`).

Plain data are values of built-in types, and of a few types of the standard library and numpy; copies keep the
exact type. This file imports nothing of this package.
"""

import collections
import datetime
import decimal
import fractions
import importlib
import operator
from collections.abc import Callable
from typing import Any

_ARRAYS = "biufcSU"  # kinds of numpy dtypes that hold no objects
_EXACT = 2**53  # every reader of JSON keeps integers below this exact
_SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque)}
_MAPPINGS = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}
_BUILT = {  # types that are rebuilt from a list of arguments, which _PARTS gives
    "complex": complex, "range": range, "slice": slice, "Fraction": fractions.Fraction, "Decimal": decimal.Decimal,
    "date": datetime.date, "datetime": datetime.datetime, "time": datetime.time, "timedelta": datetime.timedelta,
}  # fmt: skip
_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    complex: lambda value: [value.real, value.imag],
    range: lambda value: [value.start, value.stop, value.step],
    slice: lambda value: [value.start, value.stop, value.step],
    fractions.Fraction: lambda value: [value.numerator, value.denominator],
    decimal.Decimal: lambda value: [str(value)],
    datetime.date: lambda value: [value.year, value.month, value.day],
    datetime.datetime: lambda value: [*value.timetuple()[:6], value.microsecond],
    datetime.time: lambda value: [value.hour, value.minute, value.second, value.microsecond],
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}


class NoData(TypeError):
    """Raised if a value is not plain data, so it cannot be copied between processes."""


def to_plain(value: Any) -> Any:
    """Converts a value to its built-in base type, and an array to lists and numbers.

    Raises NoData if this is impossible.
    """
    bases: tuple[Any, ...] = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
    for base in bases:
        if isinstance(value, base):
            return base(value)
    if hasattr(value, "tolist"):  # arrays of numpy, torch, pandas or the module array
        return value.tolist()
    if hasattr(value, "__index__"):
        return operator.index(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise NoData(f"{type(value).__name__} cannot be converted to a built-in type")


def to_json(value: Any, encode: Callable[[Any], Any]) -> Any:
    """Converts plain data to JSON. Raises NoData for other values.

    encode: function that converts the items of a container.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else {"int": hex(value)}
    if kind is list:
        return [encode(item) for item in value]
    name = "dict" if kind is collections.defaultdict else kind.__name__
    if kind is _MAPPINGS.get(name) or kind is collections.defaultdict:
        return {name: [[encode(key), encode(item)] for key, item in value.items()]}
    if kind is _SEQUENCES.get(name):
        return {name: [encode(item) for item in value]}
    if kind in (bytes, bytearray):
        return {name: value.hex()}
    if kind in _PARTS and getattr(value, "tzinfo", None) is None:
        return {name: [encode(part) for part in _PARTS[kind](value)]}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _ARRAYS:
        return {"ndarray": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    raise NoData(name)


def from_json(kind: str, content: Any, decode: Callable[[Any], Any]) -> Any:
    """Inverts `to_json`: returns the value that it converted to `{kind: content}`.

    decode: inverts `encode`. Raises NoData for an unknown kind, and other exceptions for malformed content.
    """
    if kind == "int":
        return int(content, 16)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key): decode(item) for key, item in content})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item) for item in content)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind in _BUILT:
        return _BUILT[kind](*(decode(item) for item in content))
    if kind == "ndarray":
        return _array(*content)
    raise NoData(kind)


def update(target: Any, source: Any) -> Any:
    """Makes `target` equal to `source` in place; returns `source` if `target` cannot be changed in place.

    A remote function has received a copy of `target` and changed it; `source` is that copy.
    """
    if type(target) is not type(source) and not (isinstance(target, dict) and isinstance(source, dict)):
        return source
    if isinstance(target, list | tuple) and len(target) == len(source):
        items = [update(item, changed_item) for item, changed_item in zip(target, source, strict=True)]
        if isinstance(target, list):
            target[:] = items
        return target
    if isinstance(target, list | bytearray):
        target[:] = source
    elif isinstance(target, dict):
        table = {name: update(target[name], item) if name in target else item for name, item in source.items()}
        target.clear()
        target.update(table)
    elif isinstance(target, set | collections.deque):
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(source)
    else:
        return source
    return target


def _array(dtype: str, shape: list[int], content: str) -> Any:
    numpy = importlib.import_module("numpy")
    if numpy.dtype(dtype).kind not in _ARRAYS:
        raise ValueError(f"an array of dtype {dtype!r:.20} is not accepted, only booleans, numbers and texts")
    array = numpy.frombuffer(bytes.fromhex(content), dtype).reshape(shape)
    return array.copy() if shape else array[()]
