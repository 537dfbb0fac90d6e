"""Makes a JSON Schema of configuration files, with which editors complete and check keys."""

import typing
from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.keys.declaration import Key, keys_of, literal_values, union_members

_REFERENCE = {"type": "string", "pattern": r"\$\{\w+(:-[^}]*)?\}"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema(declaration: type) -> dict[str, Any]:
    """Returns a JSON Schema (draft 7, for yaml-language-server) of configuration files.

    It allows both spellings of keys, null for any key, and `${NAME}` for any value.
    """
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "NeoXArgs",
        "description": "A configuration file. The line `# yaml-language-server: $schema=PATH` in it names this schema",
        **_section(declaration, "#"),
    }


def _section(declaration: type, path: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, key in keys_of(declaration).items():
        properties[name] = _property(key, f"{path}/properties/{name}")
        if "_" in name:
            properties[name.replace("_", "-")] = {"$ref": f"{path}/properties/{name}"}
    keys = keys_of(declaration).items()
    required_keys = [name for name, key in keys if key.required and path != "#"]  # files are layers
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required_keys}


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
    """Returns the meaning, bounds and standing of a key in a few sentences."""
    sentences: list[str | None] = [key.meaning, key.bounds and f"A number {key.bounds}"]
    sentences += [key.no_effect and f"No effect here: {key.no_effect}", key.differs and f"Differs: {key.differs}"]
    sentences += [key.refuse and f"Refused: {key.refuse}", key.not_built and f"Later: {key.not_built} is not built yet"]
    sentences += [f"Refused: {values}: {reason}" for reason, values in _group_by_reason(key.refuse_values)]
    sentences += [
        f"Later: {values}: {reason} is not built yet" for reason, values in _group_by_reason(key.not_built_values)
    ]
    sentences += [key.same_as and f"Derived from {key.same_as}; a file may repeat it"]
    return ". ".join(sentence for sentence in sentences if sentence)


def _group_by_reason(reasons: Mapping[Any, str]) -> list[tuple[str, str]]:
    """Returns (reason, values) for each different reason; the values it applies to are joined by commas."""
    return [
        (reason, ", ".join(str(value) for value in reasons if reasons[value] == reason))
        for reason in dict.fromkeys(reasons.values())
    ]


def _kind(member: Any, key: Key) -> dict[str, Any]:
    if choices := literal_values(member):
        texts = [choice for choice in choices if isinstance(choice, str)]
        non_texts = [choice for choice in choices if not isinstance(choice, str)]
        return {"enum": _spellings(texts) + non_texts}
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
    """Returns each text in four spellings: as declared, in lower case, in upper case and capitalised.

    Values are compared without case, which a schema cannot express.
    """
    return list(
        dict.fromkeys(spelling for text in texts for spelling in (text, text.lower(), text.upper(), text.capitalize()))
    )


def _unique(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
