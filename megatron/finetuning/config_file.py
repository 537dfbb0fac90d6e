"""Writes the configuration of a fine-tuning: one file, which train.py runs as it is."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys with dotted names, such as `optimizer.params.lr`, as sections of their first name."""
    result: dict[str, Any] = {key: value for key, value in keys.items() if "." not in key}
    for path, value in keys.items():
        if "." not in path:
            continue
        section = result
        *parents, last = path.split(".")
        for name in parents:
            inner = section.get(name)
            section[name] = dict(inner) if isinstance(inner, Mapping) else {}
            section = section[name]
        section[last] = value
    return result


def config_text(command: Sequence[str], file: str, parts: Mapping[str, Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Returns the file's text.

    command: the words that were typed. parts: keys under a title. notes: why keys were chosen.
    """
    lines = [f"# Written by: python {shlex.join(command)}", f"# It is run by: python deepy.py train.py {file}"]
    lines += [f"# {note}" for note in notes]
    for title, keys in parts.items():
        lines += ["", f"# {title}", yaml.safe_dump(dict(keys), sort_keys=False, width=110, allow_unicode=True).rstrip()]
    return "\n".join(lines) + "\n"
