"""Texts that show a configuration: `--print-config` and the dump at the start of a run."""

import json
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.declare import Key, keys_of, union_members
from megatron.neox_arguments.frozen import thaw

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs


def print_config(args: "NeoXArgs") -> str:
    """Every resolved value with its origin, aligned, values that are not defaults first; reads back as YAML."""
    rows = [(path, _yaml(value), args.origin(path)) for path, value in _flat(args)]
    changed = [row for row in rows if row[2] != "default"]
    default = [row for row in rows if row[2] == "default"]
    path_width = max(len(path) for path, _, _ in rows) + 1
    value_width = min(40, max(len(value) for _, value, _ in rows))
    lines = []
    for title, part in (("set or derived", changed), ("defaults", default)):
        lines.append(f"# {title}")
        lines += [f"{path + ':':<{path_width}} {value:<{value_width}}  # {origin}" for path, value, origin in part]
    lines += [f"# note: {note}" for note in args.notes()]
    return "\n".join(lines)


def arguments_dump(args: "NeoXArgs") -> str:
    """The dump GPT-NeoX prints at start: updated values first, then defaults, each with dots in between."""
    rows = []
    for name, key in keys_of(type(args)).items():
        value = getattr(args, name)
        row = f"  {name} {'.' * (32 - len(name))} {thaw(value)}".replace("\n", "\\n")
        row += "." * (64 - len(row)) + ("default" if value == key.default else "updated")
        rows.append(row)
    rows = sorted(sorted(rows), key=lambda row: row[-7:], reverse=True)
    begin, end = (
        "-------------------- arguments --------------------",
        "---------------- end of arguments ----------------",
    )
    return "\n".join([begin, *rows, end])


def config_reference(declaration: type) -> str:
    """Markdown table of every key: type, default, meaning; sub-keys of a section follow their key."""
    lines, owner = [], ""
    for key in keys_of(declaration).values():
        if key.owner != owner:
            owner = key.owner
            lines += ["", f"## {_title(owner)}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += list(_rows(key, ""))
    return "\n".join(lines)


def _flat(args: "NeoXArgs") -> Iterator[tuple[str, Any]]:
    for name, key in keys_of(type(args)).items():
        value = getattr(args, name)
        yield from _flat_value(name, value, key)


def _flat_value(path: str, value: Any, key: Key) -> Iterator[tuple[str, Any]]:
    if key.section is None or value is None:
        yield path, value
        return
    for name, inner in keys_of(key.section).items():
        if name in value:
            yield from _flat_value(f"{path}.{name}", value[name], inner)


def _yaml(value: Any) -> str:
    """A value as one line of YAML (JSON is YAML); the same kind for all layers is shortened as NeoX writes it."""
    if isinstance(value, tuple) and len(value) > 1 and set(value) in ({"flash"}, {"global"}):
        value = [[[value[0]], len(value)]]
    return json.dumps(thaw(value), ensure_ascii=False)


def _rows(key: Key, prefix: str) -> Iterator[str]:
    meaning = key.meaning
    if key.no_effect is not None:
        meaning += f". *No effect here: {key.no_effect}*"
    if key.refuse is not None:
        meaning += f". *Refused: {key.refuse}*"
    if key.later:
        meaning += f". *Not built yet: {', '.join(map(str, key.later))}*"
    default = "" if key.required else f"`{_yaml(key.default)}`"
    cells = [f"`{prefix}{key.name}`", _type(key), "**required**" if key.required else default, meaning]
    yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    if key.section is not None:
        for inner in keys_of(key.section).values():
            yield from _rows(inner, f"{prefix}{key.name}.")


def _type(key: Key) -> str:
    if key.choices:
        return ", ".join(f"`{v if isinstance(v, str) else _yaml(v)}`" for v in key.choices)
    return " or ".join(_type_name(member) for member in union_members(key.type) if member is not type(None))


def _type_name(member: Any) -> str:
    if typing.get_origin(member) is tuple:
        element = typing.get_args(member)[0]
        return "list" if element is Any else f"list of {element.__name__}"
    return "mapping" if typing.get_origin(member) is Mapping else member.__name__


def _title(owner: str) -> str:
    words = "".join(" " + c.lower() if c.isupper() else c for c in owner.removesuffix("Keys")).strip()
    return words.capitalize()
