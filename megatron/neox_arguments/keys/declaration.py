"""Defines how configuration keys are declared: one typed field for each, with its default and its meaning.

`num_layers: int = key(REQUIRED, "Number of transformer blocks", ge=1)` in a dataclass is a declaration.
Type checks, documentation and dumps are all made from declarations. `resolved.ResolvedArgs` joins all such
dataclasses; `NeoXArgs` adds GPT-NeoX's methods, and is the class that all other code uses.
"""

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final


class _Required:
    """Marks a key without a default, which every configuration must set."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()
LOSSES_IN_FP32 = "log-probabilities and losses are always computed in fp32"
STANDINGS: Final = ("honoured", "honoured, differs", "no effect", "refused", "later")


@dataclass(frozen=True)
class Key:
    """The declaration of one key: name, type, default, meaning, bounds and standing."""

    name: str
    type: Any
    default: Any
    meaning: str
    owner: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    no_effect: str | None = None  # a run accepts the key, but it changes no number; the reason
    differs: str | None = None  # what GPT-NeoX does instead, and the key that brings it back
    refuse: str | None = None  # a run refuses anything but the default; the reason and the fix
    not_built: str | None = None  # a run refuses anything but the default: this feature is not built yet
    refuse_values: Mapping[Any, str] = field(default_factory=dict)  # like refuse, for single values
    not_built_values: Mapping[Any, str] = field(default_factory=dict)  # like not_built, for single values
    source: str = "upstream"  # who brought it: GPT-NeoX (upstream), its geodesic fork, or new here
    same_as: str | None = None  # GPT-NeoX makes it from this dotted key: a file may repeat it, not contradict it
    unread: str | None = None  # GPT-NeoX never reads the key; what that means here for files of its users
    section: type | None = None  # a mapping whose sub-keys are declared by this dataclass

    @property
    def required(self) -> bool:
        """Returns whether every configuration must set the key."""
        return self.default is REQUIRED

    @property
    def bounds(self) -> str:
        """Returns the key's bounds in words, such as `at least 0 and less than 1`; "" without bounds."""
        limits = ((self.ge, "at least"), (self.gt, "more than"), (self.le, "at most"), (self.lt, "less than"))
        return " and ".join(f"{text} {bound}" for bound, text in limits if bound is not None)

    @property
    def standing(self) -> str:
        """Returns one of STANDINGS, such as "no effect": whether a run honours the key, ignores it, or
        refuses it."""
        if self.no_effect is not None:
            return "no effect"
        if self.differs is not None:
            return "honoured, differs"
        return "refused" if self.refuse is not None else "later" if self.not_built is not None else "honoured"

    def refusal(self, value: Any) -> str | None:
        """Returns why a run refuses this value of the key; None if the run accepts it.

        Unset, empty and default values are accepted.
        """
        off = isinstance(value, Mapping) and value.get("enabled") is False
        if value is None or value == self.default or value in ({}, (), []) or off:
            return None
        if self.refuse is not None:
            return self.refuse
        if self.not_built is not None:
            return f"{self.not_built} is not built yet"
        if isinstance(value, tuple):
            return next((reason for reason in map(self.refusal, value) if reason), None)
        lowered = value.lower() if isinstance(value, str) else value
        for reasons, text in ((self.refuse_values, "{}"), (self.not_built_values, "{} is not built yet")):
            for refused, reason in reasons.items():
                if lowered == (refused.lower() if isinstance(refused, str) else refused):
                    return text.format(reason)
        return None

    @property
    def choices(self) -> tuple[Any, ...]:
        """Returns the values that a key with a Literal type may have; () for any other key."""
        return tuple(v for member in union_members(self.type) for v in literal_values(member))


def key(default: Any, meaning: str, **details: Any) -> Any:
    """Declares a key as a dataclass field. `details` are the other fields of `Key` (bounds, standing,
    section).

    A default of None means that the key may be unset: its value is then None, or is derived from other keys.
    """
    return field(default=default, metadata={"meaning": meaning, **details})


def new_key(default: Any, meaning: str, **details: Any) -> Any:
    """Declares a key that neither GPT-NeoX nor its geodesic fork has; the parameters are those of `key`."""
    return key(default, meaning, source="new", **details)


def keys_of(declaration: type) -> Mapping[str, Key]:
    """Returns every key that a dataclass and its bases declare, by name, in order of declaration."""
    return _keys_of(declaration)


@functools.cache
def _keys_of(declaration: type) -> Mapping[str, Key]:
    hints = typing.get_type_hints(declaration)
    keys = {}
    for item in fields(declaration):
        if "meaning" in item.metadata:
            owner = next(c for c in reversed(declaration.__mro__) if item.name in getattr(c, "__annotations__", {}))
            keys[item.name] = Key(item.name, hints[item.name], item.default, owner=owner.__name__, **item.metadata)
    return types.MappingProxyType(keys)


@functools.cache
def required_keys(declaration: type) -> tuple[str, ...]:
    """Returns the names of the keys that every configuration must set, in order of declaration."""
    return tuple(name for name, key in keys_of(declaration).items() if key.required)


@functools.cache
def defaults_of(declaration: type) -> Mapping[str, Any]:
    """Returns the default of each key by its name; None for required keys."""
    keys = keys_of(declaration)
    return types.MappingProxyType({name: None if key.required else key.default for name, key in keys.items()})


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union type: `int | None` gives (int, NoneType). Any other type gives
    (itself,)."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """Returns the values of a Literal type: `Literal["a", "b"]` gives ("a", "b"). Any other type gives ()."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
