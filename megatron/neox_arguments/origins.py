"""The origins of a configuration's values, which messages name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.neox_arguments.errors import ConfigError, ErrorCollector
from megatron.neox_arguments.frozen import FrozenDict
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.model import DROPOUT_KEYS


@dataclass(frozen=True)
class Origins:
    """The values that the user wrote and the places where they stand; a base class of configurations."""

    user_values: Mapping[str, Any] = field(default_factory=FrozenDict)
    """The keys that the user wrote and their values, unresolved; everything else is made from them."""
    origins: Mapping[str, str] = field(default_factory=FrozenDict)
    """The places where the user wrote the keys, by dotted path: `a.yml:12`, or the name of a flag."""

    def origin(self, key: str) -> str:
        """Returns the origin of the value of `key` (dotted for sub-keys): `a.yml:12`, a flag, "derived" or
        "default"."""
        written_at = ErrorCollector(self.origins).origin(key)
        name, *inner = key.split(".")
        if inner:
            user_value: Any = self.user_values
            for part in (name, *inner):
                user_value = user_value.get(part) if isinstance(user_value, Mapping) else None
            return written_at if written_at is not None and user_value is not None else "default"
        value = getattr(self, name)
        if written_at is None:
            return "default" if value == keys_of(type(self))[name].default else "derived"
        changed = value == 0.0 and name in ("gradient_clipping", *DROPOUT_KEYS) and self.user_values[name] != 0
        return f"derived from {written_at}" if changed else written_at

    def error(self, key: str, text: str) -> ConfigError:
        """Returns a ConfigError about the value of `key`, to be raised. Its message begins with where the key
        was set."""
        return ConfigError([f"{self.origin(key)}: {key}: {text}"])

    def cite(self, key: str) -> str:
        """Returns the value of `key` and where it was set, for messages: `12 (a.yml:3)`."""
        return f"{getattr(self, key)} ({self.origin(key)})"
