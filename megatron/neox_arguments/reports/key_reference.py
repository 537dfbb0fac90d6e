"""Documentation of keys: the generated reference, and the pages of `--help-config`."""

import difflib
import fnmatch
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.neox_arguments.errors import ConfigError
from megatron.neox_arguments.keys.declaration import STANDINGS, Key, keys_of, union_members
from megatron.neox_arguments.reports.config_dump import yaml_value
from megatron.neox_arguments.reports.schema import description

_SOURCES = {"upstream": "GPT-NeoX", "fork": "geodesic fork", "new": "new here"}
_TABLE = ["", "| key | type | default | standing | meaning |", "|---|---|---|---|---|"]


def config_reference(declaration: type) -> str:
    """Markdown: how many keys have which standing, then a table of every key; sub-keys follow their key."""
    lines, owner = _counts(declaration), ""
    for key in keys_of(declaration).values():
        if key.owner != owner:
            owner = key.owner
            lines += ["", f"## {_title(owner)}", *_TABLE]
        lines += [_row(path, inner) for path, inner in _with_sections(key, "")]
    return "\n".join(lines)


def help_pages(declaration: type, pattern: str) -> str:
    """A page for every key that `pattern` names: a key, a dotted sub-key, or a pattern such as `lr_*`.

    Raises ConfigError, with near names, when there is none.
    """
    pattern = pattern.replace("-", "_").lower()
    keys = {path: key for name in keys_of(declaration).values() for path, key in _with_sections(name, "")}
    names = [path for path in keys if path.lower() == pattern]
    names = [path for name in names for path in keys if path == name or path.startswith(f"{name}.")]
    names = names or [path for path in keys if fnmatch.fnmatchcase(path.lower(), pattern)]
    names = names or [path for path in keys if pattern in path.lower() and not set(pattern) & set("*?[")]
    if not names:
        near = difflib.get_close_matches(pattern, keys, n=3)
        raise ConfigError([f"--help-config {pattern}: no such key" + (f"; near are {', '.join(near)}" if near else "")])
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
    if key.choices:
        return ", ".join(f"`{v if isinstance(v, str) else yaml_value(v)}`" for v in key.choices)
    return " or ".join(_type_name(member) for member in union_members(key.type) if member is not type(None))


def _type_name(member: Any) -> str:
    if typing.get_origin(member) is tuple:
        element = typing.get_args(member)[0]
        names = " or ".join(inner.__name__ for inner in union_members(element)) if element is not Any else ""
        return f"list of {names}" if names else "list"
    return "mapping" if typing.get_origin(member) is Mapping else member.__name__


def _title(owner: str) -> str:
    words = "".join(" " + c.lower() if c.isupper() else c for c in owner.removesuffix("Keys")).strip()
    return words.capitalize()
