"""A JSON Schema of configuration files, for editors: completion and red underlines in YAML."""

import typing
from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.keys.declaration import Key, keys_of, literal_values, union_members

_REFERENCE = {"type": "string", "pattern": r"\$\{\w+(:-[^}]*)?\}"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema(declaration: type) -> dict[str, Any]:
    """Draft 7, which yaml-language-server reads. Keys in both spellings, null anywhere, `${NAME}` for any
    value."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "NeoXArgs",
        "description": "A configuration file; `# yaml-language-server: $schema=...` in a YAML file names this one",
        **_section(declaration, "#"),
    }


def _section(declaration: type, path: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, key in keys_of(declaration).items():
        properties[name] = _property(key, f"{path}/properties/{name}")
        if "_" in name:
            properties[name.replace("_", "-")] = {"$ref": f"{path}/properties/{name}"}
    needed = [name for name, key in keys_of(declaration).items() if key.required and path != "#"]  # files are layers
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": needed}


def _property(key: Key, path: str) -> dict[str, Any]:
    if key.section is not None:
        kinds = [_section(key.section, f"{path}/anyOf/0")]
    else:
        kinds = [_kind(member, key) for member in union_members(key.type)]
    schema: dict[str, Any] = {"description": description(key), "anyOf": [*_unique(kinds), {"type": "null"}, _REFERENCE]}
    if not key.required and key.default is not None:
        schema["default"] = key.default
    if key.standing in ("refused", "later"):
        schema["deprecated"] = True
    return schema


def description(key: Key) -> str:
    """Meaning, bounds and standing of a key in a few sentences."""
    sentences: list[str | None] = [key.meaning, key.bounds and f"A number {key.bounds}"]
    sentences += [key.no_effect and f"No effect here: {key.no_effect}", key.differs and f"Differs: {key.differs}"]
    sentences += [key.refuse and f"Refused: {key.refuse}", key.later and f"Later: {key.later} is not built yet"]
    sentences += [f"Refused: {value}: {reason}" for value, reason in key.refuse_values.items()]
    sentences += [f"Later: {value}: {reason} is not built yet" for value, reason in key.later_values.items()]
    sentences += [key.same_as and f"It is made from {key.same_as}: a file may repeat it"]
    return ". ".join(sentence for sentence in sentences if sentence)


def _kind(member: Any, key: Key) -> dict[str, Any]:
    if choices := literal_values(member):
        texts = [choice for choice in choices if isinstance(choice, str)]
        others = [choice for choice in choices if not isinstance(choice, str)]
        return {"enum": _spellings(texts) + others}
    origin = typing.get_origin(member)
    if origin is tuple:
        element = typing.get_args(member)[0]
        items = {"anyOf": [_kind(inner, key) for inner in union_members(element)]}
        return {"type": "array", **({} if element is Any else {"items": items})}
    if member is Any:
        return {}
    if origin is Mapping or member is Mapping:
        return {"type": "object"}
    bounds = {text: getattr(key, name) for name, text in _BOUNDS.items() if getattr(key, name) is not None}
    return {
        bool: {"type": "boolean"},
        int: {"type": "integer", **bounds},
        float: {"type": "number", **bounds},
        str: {"type": "string"},
        type(None): {"type": "null"},
    }[member]


def _spellings(texts: list[str]) -> list[str]:
    """Each name as declared, in lower and in upper case: names are read without case, which no schema can
    say."""
    return list(
        dict.fromkeys(spelling for text in texts for spelling in (text, text.lower(), text.upper(), text.capitalize()))
    )


def _unique(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
