"""Renders a configuration as text, for `--print-config`, `--diff-config` and the start of a run's log."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import Key, keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.validation.refusals import refusals
from megatron.neox_arguments.validation.startup_notes import startup_notes


def print_config(args: ResolvedArgs) -> str:
    """Returns all resolved values with their origins, as aligned lines of YAML. Values that are not defaults
    come first.

    Values that a run would refuse are marked, and the reasons are listed at the end.
    """
    refused = refusals(args)
    rows = [
        (path, yaml_value(value), args.origin(path) + (" (REFUSED by a run, see below)" if path in refused else ""))
        for path, value in flat_values(args)
    ]
    paths = {path for path, _, _ in rows}
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
        f"# a run refuses {'' if path in paths else args.origin(path) + ': '}{path}: {reason}"
        for path, reason in refused.items()
    ]
    return "\n".join(lines)


def diff_config(left: ResolvedArgs, right: ResolvedArgs) -> str:
    """Returns a line for each resolved value that differs: `path: value (origin) -> value (origin)`; "" if
    all are equal."""
    return "\n".join(f"{path}: {' -> '.join(texts)}" for path, texts in differing_values([left, right]).items())


def differing_values(runs: Sequence[ResolvedArgs], origins: bool = True) -> dict[str, list[str]]:
    """Returns the resolved values that differ between configurations, by dotted path.

    Each has a list with `value (origin)`, or with `value` if `origins` is false, for every configuration;
    `unset` for one without the key.
    """
    values = [dict(flat_values(args)) for args in runs]
    texts = {}
    for path in dict.fromkeys(path for run_values in values for path in run_values):
        if any(run_values.get(path) != values[0].get(path) for run_values in values):
            texts[path] = [
                (yaml_value(run_values[path]) + (f" ({args.origin(path)})" if origins else ""))
                if path in run_values else "unset"
                for args, run_values in zip(runs, values, strict=True)
            ]  # fmt: skip
    return texts


def arguments_dump(args: ResolvedArgs) -> str:
    """Returns the list of all values in the format that GPT-NeoX prints at start.

    Changed values come first, as lines `name ..... value ..... updated`. Lines of unchanged values end in
    `default`.
    """
    rows = []
    for name, key in keys_of(type(args)).items():
        if name == "config_files":
            continue
        value = getattr(args, name)
        row = f"  {name} {'.' * (32 - len(name))} {thaw(value)}".replace("\n", "\\n")
        row = without_secrets(row)
        row += "." * (64 - len(row)) + ("default" if value == key.default else "updated")
        rows.append(row)
    rows = sorted(sorted(rows), key=lambda row: row[-7:], reverse=True)
    return "\n".join([f"{' arguments ':-^51}", *rows, f"{' end of arguments ':-^50}"])


def flat_values(args: ResolvedArgs) -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, resolved value) for every key, except the texts of the configuration files."""
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
    """Returns a value as one line of YAML.

    If all layers have the same kind of attention, it is written once, as `[[["flash"], 12]]`.
    """
    if isinstance(value, tuple) and len(value) > 1 and set(value) in ({"flash"}, {"global"}):
        value = [[[value[0]], len(value)]]
    return json.dumps(thaw(value), ensure_ascii=False)
