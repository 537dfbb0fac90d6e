"""Read-only containers, so that a resolved configuration cannot be changed, not even inside a section."""

from collections.abc import Mapping
from typing import Any, NoReturn


class FrozenDict(dict):
    """A read-only dict, equal to a plain dict with the same items; pickle and json accept it."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a resolved configuration is read-only; make a changed copy with args.replace(KEY=VALUE)")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self):
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> "FrozenDict":
        return self


def freeze(value: Any) -> Any:
    """Converts mappings to `FrozenDict` and lists to tuples, recursively."""
    if isinstance(value, Mapping):
        return FrozenDict({k: freeze(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return value


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Returns the value of a key as a tuple. A list of values per layer stays a tuple; any other value
    becomes its only element."""
    return value if isinstance(value, tuple) else (value,)


def thaw(value: Any) -> Any:
    """Converts mappings to plain dicts and tuples to lists, recursively: the inverse of `freeze`."""
    if isinstance(value, Mapping):
        return {k: thaw(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(v) for v in value]
    return value
