"""Read-only containers, so that a resolved configuration cannot be written to, not even inside a section."""

from collections.abc import Mapping
from typing import Any, NoReturn


class FrozenDict(dict):
    """A dict that refuses to change; equal to a plain dict with the same items, picklable, JSON-able."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a resolved configuration is read-only; use args.replace(...)")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self):
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> "FrozenDict":
        return self


def freeze(value: Any) -> Any:
    """Mappings to `FrozenDict` and lists to tuples, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({k: freeze(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return value


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The different values of a key that may be one number for all layers or a tuple with one for each."""
    return value if isinstance(value, tuple) else (value,)


def thaw(value: Any) -> Any:
    """The opposite of `freeze`: plain dicts and lists."""
    if isinstance(value, Mapping):
        return {k: thaw(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(v) for v in value]
    return value
