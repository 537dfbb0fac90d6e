"""Completes names of keys, their values, and names of configurations, for shells."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from megatron.neox_arguments.keys.declaration import Key, keys_of
from megatron.neox_arguments.neox_args import NeoXArgs
from megatron.neox_arguments.reading.presets import SUFFIXES
from megatron.neox_arguments.reports.config_dump import yaml_value

Completer = Callable[..., list[str]]


def complete_setting(prefix: str, **ignored: Any) -> list[str]:
    """Returns what may follow in a KEY=VALUE of `--set`: keys, or the values of a key that has few."""
    name, equals, _ = prefix.partition("=")
    keys = dict(_dotted_keys(NeoXArgs))
    if not equals:
        return [f"{key}=" for key in keys if key.startswith(name)]
    return [f"{name}={value}" for value in _values(keys[name])] if name in keys else []


def complete_key(prefix: str, **ignored: Any) -> list[str]:
    """Returns the keys that begin with `prefix`."""
    return [name for name, _ in _dotted_keys(NeoXArgs) if name.startswith(prefix)]


def config_completer(preset_root: Path | None) -> Completer:
    """Returns a completer of configuration files: the user's, and presets in the folder `preset_root`."""

    def complete(prefix: str, **ignored: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        files = FilesCompleter([suffix[1:] for suffix in SUFFIXES])(prefix)
        folder = None if preset_root is None else preset_root / "configs"
        presets = [] if folder is None else [path.relative_to(folder) for path in sorted(folder.rglob("*.yml"))]
        return [*files, *(name for path in presets if (name := str(path.with_suffix(""))).startswith(prefix))]

    return complete


def _dotted_keys(declaration: type, parents: str = "") -> Iterator[tuple[str, Key]]:
    """Yields all keys with their names, such as `zero_optimization.stage`."""
    for key in keys_of(declaration).values():
        if key.section is None:
            yield parents + key.name, key
        else:
            yield from _dotted_keys(key.section, f"{parents}{key.name}.")


def _values(key: Key) -> list[str]:
    values = [*key.choices, *((True, False) if bool in (key.type, *get_args(key.type)) else ())]
    return [yaml_value(value).strip('"') for value in values]
