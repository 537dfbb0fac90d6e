"""Renders the documentation of keys: the generated reference, and the pages of `--help-config`."""

import difflib
import fnmatch
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.keys.declaration import STANDINGS, Key, keys_of, literal_values, union_members
from megatron.neox_arguments.reports.config_dump import yaml_value
from megatron.neox_arguments.reports.schema import description

_SOURCES = {"upstream": "GPT-NeoX", "fork": "geodesic fork", "new": "new here"}
_TABLE = ["", "| key | type | default | standing | meaning |", "|---|---|---|---|---|"]


def config_reference(declaration: type) -> str:
    """Returns the reference of all keys in Markdown: a table of counts, then a table of keys for each group.

    The counts say how many keys a run honours, ignores or refuses. Sub-keys follow their key.
    """
    lines, owner = _counts(declaration), ""
    for key in keys_of(declaration).values():
        if key.owner != owner:
            owner = key.owner
            lines += ["", f"## {_title(owner)}", *_TABLE]
        lines += [_row(path, inner) for path, inner in _with_sections(key, "")]
    return "\n".join(lines)


def help_pages(declaration: type, pattern: str) -> str:
    """Returns a page for every key that `pattern` names: a key, a dotted sub-key, or a pattern such as
    `lr_*`.

    Raises ConfigError, with similar names, if no key matches.
    """
    pattern = pattern.replace("-", "_").lower()
    keys = {path: key for name in keys_of(declaration).values() for path, key in _with_sections(name, "")}
    names = [path for path in keys if path.lower() == pattern]
    names = [path for name in names for path in keys if path == name or path.startswith(f"{name}.")]
    names = names or [path for path in keys if fnmatch.fnmatchcase(path.lower(), pattern)]
    names = names or [path for path in keys if pattern in path.lower() and not set(pattern) & set("*?[")]
    if not names:
        similar_keys = difflib.get_close_matches(pattern, keys, n=3)
        similar = f"; similar keys are {', '.join(similar_keys)}" if similar_keys else ""
        raise ConfigError([f"--help-config {pattern}: no such key{similar}"])
    return "\n\n".join(_page(path, keys[path]) for path in names)


def _counts(declaration: type) -> list[str]:
    keys = keys_of(declaration).values()
    lines = ["", "| standing | " + " | ".join(_SOURCES.values()) + " |", "|---" * 4 + "|"]
    for standing in (*STANDINGS, "all"):
        counts = [
            sum(key.source == source and standing in (key.standing, "all") for key in keys) for source in _SOURCES
        ]
        lines.append(f"| {standing} | " + " | ".join(map(str, counts)) + " |")
    return lines


def _with_sections(key: Key, prefix: str) -> Iterator[tuple[str, Key]]:
    yield prefix + key.name, key
    if key.section is not None:
        for inner in keys_of(key.section).values():
            yield from _with_sections(replace(inner, source=key.source), f"{prefix}{key.name}.")


def _row(path: str, key: Key) -> str:
    default = "" if key.required else f"`{yaml_value(key.default)}`"
    cells = [f"`{path}`", _type(key), "**required**" if key.required else default, key.standing, description(key)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _page(path: str, key: Key) -> str:
    rows = {
        "type": _type(key).replace("`", ""),
        "default": "required" if key.required else yaml_value(key.default),
        "standing": key.standing,
        "from": _SOURCES[key.source],
        "group": _title(key.owner),
    }
    return "\n".join([path, *(f"  {name:<9} {value}" for name, value in rows.items()), f"  {description(key)}"])


def _type(key: Key) -> str:
    types = [m for m in union_members(key.type) if m is not type(None) and not literal_values(m)]
    names = [_type_name(member, key.choices) for member in types]
    return " or ".join([_quoted(key.choices), *names] if key.choices else names)


def _quoted(values: Sequence[Any]) -> str:
    return ", ".join(f"`{v if isinstance(v, str) else yaml_value(v)}`" for v in values)


def _type_name(member: Any, choices: Sequence[Any]) -> str:
    if typing.get_origin(member) is tuple:
        element = typing.get_args(member)[0]
        if values := literal_values(element):
            return f"list of {'these' if values == choices else _quoted(values)}"
        names = " or ".join(inner.__name__ for inner in union_members(element)) if element is not Any else ""
        return f"list of {names}" if names else "list"
    return "mapping" if typing.get_origin(member) is Mapping else member.__name__


def _title(owner: str) -> str:
    words = re.split("(?<=[a-z])(?=[A-Z][a-z])", owner.removesuffix("Keys"))  # FP8, MuP and MoE stay one word
    return " ".join([words[0], *map(str.lower, words[1:])])
