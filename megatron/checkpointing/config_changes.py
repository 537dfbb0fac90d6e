"""Error text for a configuration that changed since a checkpoint: the key, its file and line, and both
values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.reports.config_dump import yaml_value

_LONGEST = 80  # characters of a value


@dataclass(frozen=True)
class ConfigChange:
    """A configuration key whose value here differs from that there, in a checkpoint or an earlier run."""

    key: str
    here: Any
    there: Any


def describe_changes(changes: Sequence[ConfigChange], args: NeoXArgs, whose: str) -> str:
    """The changes as text, in their order:
    `seq_length: 2048 (a.yml:3), but WHOSE had 1024; pack_impl: ...`."""
    return "; ".join(
        f"{change.key}: {_shown(change.here)} ({args.origin(change.key)}), but {it} had {_shown(change.there)}"
        for change, it in zip(changes, [whose] + ["it"] * len(changes), strict=False)
    )


def responsible_key(keys: Sequence[str], args: NeoXArgs, given: Mapping[str, Any]) -> str:
    """The key that an error about a derived value should name.

    keys: those that the value is derived from.
    given: the configuration that the user gave for the checkpoint.
    Returns the first key that has changed since; if there is none, the first that is set, else the last.
    """
    if given:
        for key in keys:
            if _at(given, key) != _at(args.user_values, key):
                return key
    return next((key for key in keys if args.origin(key) not in ("default", "derived")), keys[-1])


def _at(given: Any, path: str) -> Any:
    """The value at a dotted path in nested mappings; None where there is none."""
    for part in path.split("."):
        given = given.get(part) if isinstance(given, Mapping) else None
    return list(given) if isinstance(given, tuple) else given


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else yaml_value(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
