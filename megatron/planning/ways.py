"""Finds changes by which a step fits the memory of a GPU, with the same global batch, and what they cost."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.planning.machines import Machine
from megatron.planning.processes import Processes
from megatron.planning.settled import settled_args
from megatron.planning.step_model import StepModel, build_models
from megatron.training.native.engine import NativeEngine

_MOST_WAYS = 3
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")  # what keeps the global batch
_MOST_TRIED = 8  # combinations, because each takes seconds to plan


class Way(NamedTuple):
    """Keys to change.

    step_bytes, kept_bytes: the largest memory of a stage in a step, and between steps. seconds, parts: of a
        step (`StepTime`). tokens: of a step.
    """

    changes: Mapping[str, Any]
    step_bytes: int
    kept_bytes: int
    seconds: float
    parts: Mapping[str, float]
    tokens: int


def ways_out(args: NeoXArgs, machine: Machine, gpu_memory: int, processes: Processes) -> list[Way]:
    """Returns the three cheapest ways to fit `gpu_memory` bytes, or as many as are found.

    Single changes are tried first, then two at a time and three at a time, those first that free the most
    memory.
    """
    single = evaluated(args, list(_changes(args, machine.gpus_per_node)), machine, processes)
    fitting = [way for way in single if way.step_bytes <= gpu_memory]
    smallest_ways = sorted(single, key=lambda way: way.step_bytes)
    for number in (2, 3):
        if len(fitting) >= _MOST_WAYS:
            break
        joined = [_joined(ways) for ways in combinations(smallest_ways, number)]
        joined_ways = evaluated(args, [changes for changes in joined if changes][:_MOST_TRIED], machine, processes)
        fitting += [way for way in joined_ways if way.step_bytes <= gpu_memory]
    return sorted(fitting, key=lambda way: way.seconds)[:_MOST_WAYS]


def _joined(ways: Sequence[Way]) -> dict[str, Any] | None:
    """Returns all changes together; None if two of them set one key."""
    changes = [{key: value for key, value in way.changes.items() if key != _BATCH[1]} for way in ways]
    keys = [key for part in changes for key in part]
    return {key: value for part in changes for key, value in part.items()} if len(set(keys)) == len(keys) else None


def _changes(args: NeoXArgs, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Yields single changes that may save memory."""
    rows = args.train_micro_batch_size_per_gpu
    while rows % 2 == 0:
        rows //= 2
        yield {"train_micro_batch_size_per_gpu": rows}
    if args.zero_stage < 3 and args.data_parallel_size * args.context_parallel_size > 1:
        yield from ({"zero_optimization.stage": stage} for stage in range(max(args.zero_stage, 0) + 1, 4))
    if not args.checkpoint_activations:
        yield {"checkpoint_activations": True, "recompute_granularity": "selective"}
    if not args.checkpoint_activations or args.recompute_granularity == "selective":
        yield {"checkpoint_activations": True, "recompute_granularity": "full"}
    if 2 * args.tp <= gpus_per_node:
        yield {"model_parallel_size": 2 * args.tp, "sequence_parallel": True}
    yield {"pipe_parallel_size": 2 * max(args.pp, 1)}
    yield {"context_parallel_size": 2 * args.context_parallel_size}


def evaluated(
    args: NeoXArgs,
    all_changes: Sequence[Mapping[str, Any]],
    machine: Machine,
    processes: Processes,
    has_stages: bool = True,
) -> list[Way]:
    """Returns all changes with their cost, but for those that the configuration refuses.

    has_stages: as for `build_models`.
    """
    allowed: list[tuple[Mapping[str, Any], NeoXArgs]] = []
    for changes in all_changes:
        try:
            changed = changed_args(args, changes, machine)
        except UserError:
            continue
        batch = {key: getattr(changed, key) for key in _BATCH if getattr(changed, key) != getattr(args, key)}
        allowed.append(({**changes, **batch}, changed))
    models = build_models([changed for _, changed in allowed], machine, processes, has_stages)
    return [way_of(changes, model) for (changes, _), model in zip(allowed, models, strict=True)]


def way_of(changes: Mapping[str, Any], model: StepModel) -> Way:
    """Returns what a step with these changes needs."""
    memory, time = [model.memory(rank) for rank in range(model.placement.ranks)], model.step()
    return Way(
        changes, max(m.step for m in memory), max(m.kept_bytes for m in memory), time.seconds, time.parts, model.tokens
    )


def changed_args(args: NeoXArgs, changes: Mapping[str, Any], machine: Machine) -> NeoXArgs:
    """Returns the configuration with other keys and the same global batch.

    Raises UserError if the run cannot have them.
    """
    assert args.world_size is not None
    rows = changes.get("train_micro_batch_size_per_gpu", args.train_micro_batch_size_per_gpu)
    batch: dict[str, Any] = {"train_batch_size": args.train_batch_size, "gradient_accumulation_steps": None}
    if "gradient_accumulation_steps" in changes:
        batch = {"train_batch_size": None}
    changed = args.replace(**{**batch, **changes, "train_micro_batch_size_per_gpu": rows})
    NativeEngine.check(changed)
    return settled_args(changed, args.world_size, machine.gpus_per_node, lambda line: None)
