"""How a configuration key is declared: one typed line with its default and its meaning.

`num_layers: int = key(REQUIRED, "Number of transformer blocks", ge=1)` in a dataclass is a declaration; everything
else (type checks, documentation, dumps) is made from it.
"""

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True)
class Key:
    """What is known about one key besides its annotation."""

    name: str
    type: Any
    default: Any
    meaning: str
    owner: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    later: tuple[Any, ...] = ()  # GPT-NeoX values that are not built here: refused by name
    no_effect: str | None = None  # accepted, changes no number; the reason
    refuse: str | None = None  # anything but the default is refused; the reason and the fix
    section: type | None = None  # a mapping whose sub-keys are declared by this dataclass

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal key, else ()."""
        return tuple(v for member in union_members(self.type) for v in literal_values(member))


def key(default: Any, meaning: str, **facts: Any) -> Any:
    """Declare a key; `facts` are fields of `Key` (ge, gt, le, lt, later, no_effect, refuse, section).

    A default of None means that null is allowed, and that the value is None or made when resolving.
    """
    return field(default=default, metadata={"meaning": meaning, **facts})


def keys_of(declaration: type) -> Mapping[str, Key]:
    """Every key declared by a dataclass and its bases, in order of declaration."""
    return _keys_of(declaration)


@functools.cache
def _keys_of(declaration: type) -> Mapping[str, Key]:
    hints = typing.get_type_hints(declaration)
    found = {}
    for item in fields(declaration):
        if "meaning" in item.metadata:
            owner = next(c for c in reversed(declaration.__mro__) if item.name in getattr(c, "__annotations__", {}))
            found[item.name] = Key(item.name, hints[item.name], item.default, owner=owner.__name__, **item.metadata)
    return types.MappingProxyType(found)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """`int | None` -> (int, NoneType); anything else -> (itself,)."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def literal_values(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
