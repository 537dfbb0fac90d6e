"""Tells what other values of one key change: memory, seconds, and where these go."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.neox_arguments import ConfigError, NeoXArgs
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

    values: none: those next to it (`next_values`).
    Raises PlanError if the key is unknown, or no values are next to its own.
    """
    args = model.args
    value = value_of(args, key)
    values = [v for v in values or next_values(args, key) if v != value]
    refusals: dict[int, str] = {}
    for place, choice in enumerate(values):
        try:
            changed_args(args, {key: choice}, model.machine)
        except ConfigError as problem:
            refusals[place] = str(problem)
    allowed = [{key: choice} for place, choice in enumerate(values) if place not in refusals]
    ways = iter(evaluated(args, allowed, model.machine, processes))
    result = [Explained(value, way_of({}, model))]
    for place, choice in enumerate(values):
        result.append(Explained(choice, None, refusals[place]) if place in refusals else Explained(choice, next(ways)))
    return result


def value_of(args: NeoXArgs, key: str) -> Any:
    """Returns the value of a key, or of a dotted sub-key. Raises PlanError if it is unknown."""
    section, _, name = key.partition(".")
    if section not in keys_of(type(args)):
        raise PlanError(f"--explain {key}: no such key; see deepy.py train.py --help-config")
    value = getattr(args, section)
    if name and name not in value:
        raise PlanError(f"--explain {key}: {section} has no {name}; it has {', '.join(value)}")
    return value[name] if name else value


def next_values(args: NeoXArgs, key: str) -> list[Any]:
    """Returns values next to that of a key: half and double of a number, or all others of a choice.

    Raises PlanError if there are none.
    """
    value, declared = value_of(args, key), keys_of(type(args)).get(key)
    if key == "zero_optimization.stage":
        return [0, 1, 2, 3]
    if isinstance(value, bool):
        return [not value]
    choices = (
        [choice for member in union_members(declared.type) for choice in literal_values(member)] if declared else []
    )
    if choices:
        return choices
    if isinstance(value, int):
        return [*([value // 2] if value % 2 == 0 and value else []), 2 * max(value, 1)]
    raise PlanError(f"--explain {key}: its value {value} has none next to it; write --explain {key}=VALUE,VALUE")
