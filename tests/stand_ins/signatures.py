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
    parameters = []
    for kind, parameter, text in entry["parameters"]:  # infinity is a call in a default's text
        default = ast.literal_eval(text.replace("float('inf')", "1e999")) if text else Parameter.empty
        parameters.append(Parameter(parameter, getattr(Parameter, kind), default=default))
    return Signature(parameters)


def bind(package: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter, defaults included; TypeError where the true function has none."""
    bound = signature(package, name).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
