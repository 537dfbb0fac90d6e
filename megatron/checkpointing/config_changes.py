"""Describes configuration keys that changed since a checkpoint: key, file and line, and both values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.reports.config_dump import yaml_value

_LONGEST = 80  # characters of a value


@dataclass(frozen=True)
class ConfigChange:
    """A configuration key whose value differs from that of a checkpoint or an earlier run.

    current: the value in this run. previous: the value in the checkpoint or earlier run.
    """

    key: str
    current: Any
    previous: Any


def describe_changes(changes: Sequence[ConfigChange], args: ModelArgs, source: str) -> str:
    """Returns changed keys as text: `seq_length: 2048 (a.yml:3), but SOURCE had 1024; pack_impl: ...`.

    args: the current configuration. source: the name of the checkpoint."""
    return "; ".join(
        f"{change.key}: {_short_value(change.current)} ({args.origin(change.key)}), "
        f"but {subject} had {_short_value(change.previous)}"
        for change, subject in zip(changes, [source] + ["it"] * len(changes), strict=False)
    )


def responsible_key(keys: Sequence[str], args: ModelArgs, saved_config: Mapping[str, Any]) -> str:
    """Returns the configuration key that an error about a derived value should name.

    keys: the keys that the value is derived from.
    saved_config: the keys that the user had set when the checkpoint was saved.
    Returns the first of `keys` whose value changed since then. If none changed, returns the first that the
    user set, else the last."""
    if saved_config:
        for key in keys:
            if _value_at(saved_config, key) != _value_at(args.user_values, key):
                return key
    return next((key for key in keys if args.origin(key) not in ("default", "derived")), keys[-1])


def _value_at(value: Any, path: str) -> Any:
    """Returns the value at a dotted path ("a.b") in nested mappings; None if a key is missing."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return list(value) if isinstance(value, tuple) else value


def _short_value(value: Any) -> str:
    text = value if isinstance(value, str) else yaml_value(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
