"""The signatures of `tests/data/signatures`, made by `tests.stand_ins.collect`."""

import ast
import json
from functools import cache
from inspect import Parameter, Signature
from typing import Any

from tests.stand_ins.collect import FOLDER


@cache
def signature(package: str, name: str) -> Signature:
    """The parameters of a function of a package, as its archive has them."""
    entry = json.loads((FOLDER / f"{package}.json").read_text())["functions"][name]
    return Signature(
        [
            Parameter(name, getattr(Parameter, kind), default=_value(default) if default else Parameter.empty)
            for kind, name, default in entry["parameters"]
        ]
    )


def _value(default: str) -> Any:
    """A default of its source text; infinity is a call there."""
    return ast.literal_eval(default.replace("float('inf')", "1e999"))


def bind(package: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter, defaults included; TypeError where the true function has none."""
    bound = signature(package, name).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
