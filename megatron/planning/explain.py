"""Tells what other values of one key change: memory, seconds, and where these go."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.neox_arguments.keys.declaration import keys_of, literal_values, union_members
from megatron.planning.processes import PlanError, Processes
from megatron.planning.step_model import StepModel
from megatron.planning.ways import Way, changed_args, evaluated, way_of


class Explained(NamedTuple):
    """A value of a key. way: what a step needs with it. refusal: why the run cannot have it; None: it can."""

    value: Any
    way: Way | None
    refusal: str | None = None


def explain(model: StepModel, key: str, values: Sequence[Any], processes: Processes) -> list[Explained]:
    """Returns what a step needs with each value of a key, that of the configuration first.

    values: those to plan (`explained_values`).
    """
    args = model.args
    refusals: dict[int, str] = {}
    for place, choice in enumerate(values):
        try:
            changed_args(args, {key: choice}, model.machine)
        except UserError as problem:
            refusals[place] = str(problem)
    allowed = [{key: choice} for place, choice in enumerate(values) if place not in refusals]
    ways = iter(evaluated(args, allowed, model.machine, processes))
    result = [Explained(value_of(args, key), way_of({}, model))]
    for place, choice in enumerate(values):
        result.append(Explained(choice, None, refusals[place]) if place in refusals else Explained(choice, next(ways)))
    return result


def explained_values(args: NeoXArgs, key: str, values: Sequence[Any]) -> list[Any]:
    """Returns the values of a key to plan besides its own. values: none: those next to it.

    Raises PlanError if the key is unknown, or no values are next to its own.
    """
    value = value_of(args, key)
    return [choice for choice in values or _next_values(args, key, value) if choice != value]


def value_of(args: NeoXArgs, key: str) -> Any:
    """Returns the value of a key, or of a dotted sub-key. Raises PlanError if it is unknown."""
    section, *names = key.split(".")
    if section not in keys_of(type(args)):
        raise PlanError(f"--explain {key}: no such key; see deepy.py train.py --help-config")
    value = getattr(args, section)
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            contents = f"it has {', '.join(value)}" if isinstance(value, Mapping) else f"it is {value}"
            raise PlanError(f"--explain {key}: {section} has no {name}; {contents}")
        section, value = f"{section}.{name}", value[name]
    return value


def _next_values(args: NeoXArgs, key: str, value: Any) -> list[Any]:
    """Returns values next to that of a key: half and double of a number, or all others of a choice."""
    declared = keys_of(type(args)).get(key)
    if key == "zero_optimization.stage":
        return [0, 1, 2, 3]
    if isinstance(value, bool):
        return [not value]
    members = () if declared is None else union_members(declared.type)
    if choices := [choice for member in members for choice in literal_values(member)]:
        return choices
    if isinstance(value, int):
        return [*([value // 2] if value % 2 == 0 and value else []), 2 * max(value, 1)]
    raise PlanError(f"--explain {key}: its value {value} has none next to it; write --explain {key}=VALUE,VALUE")
