"""Texts that show a configuration: `--print-config`, `--diff-config` and the dump at the start of a run."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import Key, keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.validation.refusals import refusals
from megatron.neox_arguments.validation.startup_notes import startup_notes


def print_config(args: ResolvedArgs) -> str:
    """Every resolved value with its origin, aligned, values that are not defaults first; reads back as YAML.

    What a run would refuse is marked, with the reasons at the end.
    """
    refused = refusals(args)
    rows = [
        (path, yaml_value(value), args.origin(path) + (" (REFUSED by a run, see below)" if path in refused else ""))
        for path, value in flat_values(args)
    ]
    shown = {path for path, _, _ in rows}
    changed = [row for row in rows if row[2] != "default"]
    default = [row for row in rows if row[2] == "default"]
    path_width = max(len(path) for path, _, _ in rows) + 1
    value_width = min(40, max(len(value) for _, value, _ in rows))
    lines = []
    for title, part in (("set or derived", changed), ("defaults", default)):
        lines.append(f"# {title}")
        lines += [f"{path + ':':<{path_width}} {value:<{value_width}}  # {origin}" for path, value, origin in part]
    lines += [f"# note: {note}" for note in startup_notes(args)]
    lines += [
        f"# a run refuses {'' if path in shown else args.origin(path) + ': '}{path}: {reason}"
        for path, reason in refused.items()
    ]
    return "\n".join(lines)


def diff_config(one: ResolvedArgs, other: ResolvedArgs) -> str:
    """The resolved values that differ, a line each: `path: one (origin) -> other (origin)`; "" when none
    does."""
    return "\n".join(f"{path}: {' -> '.join(texts)}" for path, texts in differing_values([one, other]).items())


def differing_values(runs: Sequence[ResolvedArgs]) -> dict[str, list[str]]:
    """The resolved values that differ between configurations, by dotted path, as `value (origin)` or `unset`
    for each of them."""
    values = [dict(flat_values(args)) for args in runs]
    texts = {}
    for path in dict.fromkeys(path for of_run in values for path in of_run):
        if any(of_run.get(path) != values[0].get(path) for of_run in values):
            texts[path] = [
                f"{yaml_value(of_run[path])} ({args.origin(path)})" if path in of_run else "unset"
                for args, of_run in zip(runs, values, strict=True)
            ]
    return texts


def arguments_dump(args: ResolvedArgs) -> str:
    """The dump GPT-NeoX prints at start: updated values first, then defaults, each with dots in between."""
    rows = []
    for name, key in keys_of(type(args)).items():
        if name == "config_files":
            continue
        value = getattr(args, name)
        row = f"  {name} {'.' * (32 - len(name))} {thaw(value)}".replace("\n", "\\n")
        row += "." * (64 - len(row)) + ("default" if value == key.default else "updated")
        rows.append(row)
    rows = sorted(sorted(rows), key=lambda row: row[-7:], reverse=True)
    return "\n".join([f"{' arguments ':-^51}", *rows, f"{' end of arguments ':-^50}"])


def flat_values(args: ResolvedArgs) -> Iterator[tuple[str, Any]]:
    """Every resolved value but the files' text, by dotted path."""
    for name, key in keys_of(type(args)).items():
        if name != "config_files":
            yield from _flat_value(name, getattr(args, name), key)


def _flat_value(path: str, value: Any, key: Key) -> Iterator[tuple[str, Any]]:
    if key.section is None or value is None:
        yield path, value
        return
    for name, inner in keys_of(key.section).items():
        if name in value:
            yield from _flat_value(f"{path}.{name}", value[name], inner)


def yaml_value(value: Any) -> str:
    """A value as one line of YAML (JSON is YAML); the same kind for all layers is shortened as NeoX writes
    it."""
    if isinstance(value, tuple) and len(value) > 1 and set(value) in ({"flash"}, {"global"}):
        value = [[[value[0]], len(value)]]
    return json.dumps(thaw(value), ensure_ascii=False)
