"""Plain data as JSON, as it travels between a program and its tests (`remote_objects.py`): copies, of
built-in types and a few of the library and numpy, each made again as exactly that type. Imports nothing of
ours."""

import collections
import datetime
import decimal
import fractions
import importlib
import operator
from collections.abc import Callable
from typing import Any

_ARRAYS = "biufcSU"  # the kinds of dtypes that hold no objects
_EXACT = 2**53  # integers that every reader of JSON keeps
_SEQUENCES = {one.__name__: one for one in (tuple, set, frozenset, collections.deque)}
_MAPPINGS = {one.__name__: one for one in (dict, collections.OrderedDict, collections.Counter)}
_BUILT = {  # from a list of arguments
    "complex": complex, "range": range, "slice": slice, "Fraction": fractions.Fraction, "Decimal": decimal.Decimal,
    "date": datetime.date, "datetime": datetime.datetime, "time": datetime.time, "timedelta": datetime.timedelta,
}  # fmt: skip
_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    complex: lambda one: [one.real, one.imag],
    range: lambda one: [one.start, one.stop, one.step],
    slice: lambda one: [one.start, one.stop, one.step],
    fractions.Fraction: lambda one: [one.numerator, one.denominator],
    decimal.Decimal: lambda one: [str(one)],
    datetime.date: lambda one: [one.year, one.month, one.day],
    datetime.datetime: lambda one: [one.year, one.month, one.day, one.hour, one.minute, one.second, one.microsecond],
    datetime.time: lambda one: [one.hour, one.minute, one.second, one.microsecond],
    datetime.timedelta: lambda one: [one.days, one.seconds, one.microseconds],
}


class NoData(TypeError):
    """A value that does not travel as a copy."""


def plain(value: Any) -> Any:
    """What a value is as data: its built-in base, or a list or number that it turns itself into. Raises
    NoData."""
    bases: tuple[Any, ...] = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
    for base in bases:
        if isinstance(value, base):
            return base(value)
    if hasattr(value, "tolist"):  # of numpy, torch, pandas, array
        return value.tolist()
    if hasattr(value, "__index__"):
        return operator.index(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise NoData(f"{type(value).__name__} is no plain data")


def to_json(value: Any, encode: Callable[[Any], Any]) -> Any:
    """A value as JSON. encode: does the same with what it holds. Raises NoData."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else {"int": hex(value)}
    if kind is list:
        return [encode(one) for one in value]
    name = "dict" if kind is collections.defaultdict else kind.__name__
    if kind is _MAPPINGS.get(name) or kind is collections.defaultdict:
        return {name: [[encode(key), encode(one)] for key, one in value.items()]}
    if kind is _SEQUENCES.get(name):
        return {name: [encode(one) for one in value]}
    if kind in (bytes, bytearray):
        return {name: value.hex()}
    if kind in _PARTS and getattr(value, "tzinfo", None) is None:
        return {name: [encode(part) for part in _PARTS[kind](value)]}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _ARRAYS:
        return {"ndarray": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    raise NoData(name)


def from_json(kind: str, content: Any, decode: Callable[[Any], Any]) -> Any:
    """The value that `to_json` has made `{kind: content}` of. Raises NoData for another kind, and whatever
    content of another form leads to."""
    if kind == "int":
        return int(content, 16)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key): decode(one) for key, one in content})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(one) for one in content)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind in _BUILT:
        return _BUILT[kind](*(decode(one) for one in content))
    if kind == "ndarray":
        return _array(*content)
    raise NoData(kind)


def update(ours: Any, theirs: Any) -> Any:
    """Bring what a function has done to its arguments into those of the caller, in place; what the caller
    then holds."""
    if type(ours) is not type(theirs) and not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return theirs
    if isinstance(ours, list | tuple) and len(ours) == len(theirs):
        items = [update(one, other) for one, other in zip(ours, theirs, strict=True)]
        if isinstance(ours, list):
            ours[:] = items
        return ours
    if isinstance(ours, list | bytearray):
        ours[:] = theirs
    elif isinstance(ours, dict):
        table = {name: update(ours[name], one) if name in ours else one for name, one in theirs.items()}
        ours.clear()
        ours.update(table)
    elif isinstance(ours, set):
        ours.clear()
        ours.update(theirs)
    elif isinstance(ours, collections.deque):
        ours.clear()
        ours.extend(theirs)
    else:
        return theirs
    return ours


def _array(dtype: str, shape: list[int], content: str) -> Any:
    numpy = importlib.import_module("numpy")
    if numpy.dtype(dtype).kind not in _ARRAYS:
        raise ValueError(f"an array of {dtype!r:.20}")
    array = numpy.frombuffer(bytes.fromhex(content), dtype).reshape(shape)
    return array.copy() if shape else array[()]
