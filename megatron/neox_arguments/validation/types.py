"""Checks values of keys against their declarations: types, allowed values, bounds, unknown keys."""

import difflib
import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import yaml

from megatron.neox_arguments.errors import ErrorCollector, format_value
from megatron.neox_arguments.frozen import FrozenDict, freeze, thaw
from megatron.neox_arguments.keys.declaration import (
    Key,
    defaults_of,
    keys_of,
    literal_values,
    required_keys,
    union_members,
)
from megatron.neox_arguments.reading.yaml_loader import ConfigLoader, EnvText
from megatron.neox_arguments.validation.other_stacks import name_here


class _Mismatch(Exception):
    """Raised if a value has the wrong type or is out of bounds. The message says what was expected."""


def check_keys(
    declaration: type, user_values: Mapping[str, Any], problems: ErrorCollector, prefix: str = ""
) -> dict[str, Any]:
    """Returns the checked values of all keys that `declaration` declares, with defaults for unset keys.
    Problems are added to `problems`, not raised.

    A key with a problem gets its default in the result (None if it is required). prefix: the section's dotted
    path with a dot, for messages.
    """
    keys = keys_of(declaration)
    for name in user_values:
        if name not in keys:
            problems.add(prefix + name, unknown(name, keys))
    values, required = dict(defaults_of(declaration)), required_keys(declaration)
    for name, key in keys.items():
        if user_values.get(name) is not None:
            values[name] = _checked(key, prefix + name, user_values[name], problems, values[name])
            if key.section is None and isinstance(user_values, dict) and _from_environment(user_values[name]):
                user_values[name] = thaw(values[name])  # ranks get the value, not their own environment
        elif name in required and problems.complete:
            problems.add(prefix + name, f"is required: {key.meaning[0].lower() + key.meaning[1:]}")
    return values


def resolve_section(
    declaration: type, user_values: Mapping[str, Any], problems: ErrorCollector, prefix: str = ""
) -> FrozenDict:
    """Returns the checked values of a section as a read-only dict, without keys that are refused or have no
    effect.

    declaration: the dataclass of the section's keys. prefix: the section's dotted path with a dot, for
    messages.
    """
    keys = keys_of(declaration)
    values = check_keys(declaration, user_values, problems, prefix)
    silent = {name for name, key in keys.items() if key.standing in ("refused", "later", "no effect")}
    return freeze({name: value for name, value in values.items() if name not in silent})


def check_value(key: Key, path: str, value: Any, problems: ErrorCollector) -> None:
    """Checks whether `key` may have this value, and adds problems under its dotted `path`."""
    _checked(key, path, value, problems, None)


def _checked(key: Key, path: str, value: Any, problems: ErrorCollector, fallback: Any) -> Any:
    if key.section is not None:
        if not isinstance(value, Mapping):
            problems.add(path, f"expected a mapping, got {format_value(value)}")
            return fallback
        return resolve_section(key.section, value, problems, path + ".")
    try:
        value = _coerce(key.type, freeze(value))
        _check_bounds(key, value)
    except _Mismatch as mismatch:
        problems.add(path, f"expected {mismatch}, got {format_value(value)}")
        return fallback
    return value


def _coerce(annotation: Any, value: Any) -> Any:
    """Converts `value` to the annotated type. An int is accepted as a float, and texts of a Literal are
    compared without case. Raises _Mismatch."""
    members = [member for member in union_members(annotation) if member is not type(None)]
    expected = []
    for member in members:
        try:
            return _coerce_one(member, value)
        except _Mismatch as mismatch:
            expected.append(str(mismatch))
    raise _Mismatch(" or ".join(expected))


def _from_environment(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_from_environment, value)) if isinstance(value, list | tuple) else isinstance(value, EnvText)


def _coerce_one(member: Any, value: Any) -> Any:
    if isinstance(value, EnvText) and member is not str:
        try:
            value = freeze(yaml.load(value, Loader=ConfigLoader))
        except yaml.YAMLError:
            value = str(value)
    allowed = literal_values(member)
    if allowed:
        for choice in allowed:
            if value is choice or (
                isinstance(value, str) and isinstance(choice, str) and value.lower() == choice.lower()
            ):
                return choice
        if value is False and "off" in allowed:  # YAML 1.1 reads off as false
            return "off"
        raise _Mismatch(_one_of(allowed))
    if get_origin(member) is tuple:
        if not isinstance(value, tuple):
            raise _Mismatch("a list")
        element = get_args(member)[0]
        if element is Any:
            return value
        try:
            return tuple(_coerce(element, v) for v in value)
        except _Mismatch as mismatch:
            raise _Mismatch(f"a list of {mismatch}") from None
    if member is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _Mismatch("a number that a float can hold") from None
    if member is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3
    if member is Any:
        return value
    if get_origin(member) is Mapping or member is Mapping:
        if not isinstance(value, Mapping):
            raise _Mismatch("a mapping")
        return freeze({name: _coerce(Any, inner) for name, inner in value.items()})
    if not isinstance(value, member) or (isinstance(value, bool) and member is not bool):
        raise _Mismatch(member.__name__)
    if member is float and not math.isfinite(value):
        raise _Mismatch("a finite number")
    return value


def _check_bounds(key: Key, value: Any) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, str) or (  # a number or auto
            (key.ge is None or number >= key.ge)
            and (key.gt is None or number > key.gt)
            and (key.le is None or number <= key.le)
            and (key.lt is None or number < key.lt)
        ):
            continue
        raise _Mismatch(f"a number {key.bounds}")


def unknown(name: str, keys: Mapping[str, Key]) -> str:
    """Returns the message about a name that is not a key, with our counterpart or similar keys."""
    if (counterpart := name_here(name)) is not None:
        return f"unknown key; its counterpart here is {counterpart}"
    similar_keys = difflib.get_close_matches(name, keys, n=3, cutoff=0.6)
    ratios = [difflib.SequenceMatcher(None, name, similar_key).ratio() for similar_key in similar_keys]
    similar_keys = [
        similar_key for similar_key, ratio in zip(similar_keys, ratios, strict=True) if ratio > ratios[0] - 0.05
    ]
    return "unknown key" + (f"; did you mean {' or '.join(similar_keys)}?" if similar_keys else "; remove it")


def _one_of(values: tuple[Any, ...]) -> str:
    texts = [v if isinstance(v, str) else format_value(v) for v in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]
