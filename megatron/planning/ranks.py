"""Chooses ranks that stand for all ranks of a run, and runs them in processes with fake CUDA."""

from collections.abc import Iterator, Sequence
from functools import partial

from megatron.neox_arguments import NeoXArgs
from megatron.planning.operations import Trace
from megatron.planning.processes import Processes, StepError
from megatron.planning.report import RankReport


def strides(args: NeoXArgs) -> dict[str, tuple[int, int]]:
    """Returns (distance between neighbours, number of ranks) along each axis, in the order that
    docs/layouts.md gives: tensor, context, data, pipe."""
    sizes = {"tensor": args.tp, "context": args.context_parallel_size, "data": args.data_parallel_size}
    sizes["pipe"] = max(args.pp, 1)
    distances, distance = {}, 1
    for axis, size in sizes.items():
        distances[axis] = (distance, size)
        distance *= size
    return distances


def expected_groups(args: NeoXArgs, rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of a rank's groups along each axis, derived from the documented order alone."""
    distances = strides(args)
    groups, places = {}, {}
    for axis, (distance, size) in distances.items():
        places[axis] = rank // distance % size
        groups[axis] = tuple(rank + (i - places[axis]) * distance for i in range(size))
    # Ranks that hold the same layers and slices of weights: data ranks, and the context ranks of each.
    distance, size = distances["tensor"][1], args.data_parallel_size * args.context_parallel_size
    place = rank // distance % size
    groups["data_context"] = tuple(rank + (i - place) * distance for i in range(size))
    expert, ulysses = args.expert_parallel_size, args.ulysses_size
    groups["expert"] = groups["data_context"][place // expert * expert :][:expert]
    groups["expert_data"] = groups["data_context"][place % expert :: expert]
    groups["context_heads"] = groups["context"][places["context"] // ulysses * ulysses :][:ulysses]
    groups["context_keys"] = groups["context"][places["context"] % ulysses :: ulysses]
    return groups


def ranks_of_stages(args: NeoXArgs) -> list[int]:
    """Returns one rank of each pipeline rank."""
    distance, size = strides(args)["pipe"]
    return [i * distance for i in range(size)]


def ranks_of_axes(args: NeoXArgs) -> list[int]:
    """Returns all ranks that differ from the first one along a single axis, and the last rank of the run."""
    along_axes = {i * distance for distance, size in strides(args).values() for i in range(size)}
    distance, size = strides(args)["pipe"]
    return sorted(along_axes | {distance * size - 1})


def run_ranks(args: NeoXArgs, ranks: Sequence[int], processes: Processes) -> Iterator[RankReport]:
    """Yields the report of each rank, in the order of `ranks`, as soon as it is there.

    args: with the world size, the vocabulary and few micro-batches resolved.
    Raises PlanError as `Processes.map` does.
    """
    yield from processes.map(partial(_run_rank, args.to_json()), ranks)


def trace_steps(ranks: Sequence[tuple[NeoXArgs, int]], processes: Processes) -> Iterator[Trace]:
    """Yields the trace of a step of each rank of a configuration, in their order.

    ranks: configurations as `traced_args` returns them, each with a rank.
    Raises PlanError as `Processes.map` does, and StepError if a step fails.
    """
    yield from processes.map(_trace, [(args.to_json(), rank) for args, rank in ranks])


def traced_args(args: NeoXArgs) -> NeoXArgs:
    """Returns the configuration of the step that is traced: not compiled, with few micro-batches: the first,
    the last, and with pipelines one between them."""
    micro_batches = min(args.gradient_accumulation_steps, 3 if args.pp > 1 else 2)
    if args.pp > 1 and args.pipeline_schedule == "dualpipev":
        micro_batches = 2 * args.pp  # it has no fewer
    return with_micro_batches(args.replace(compile=False, distributed_backend="nccl"), micro_batches)


def dry_run_args(args: NeoXArgs) -> NeoXArgs:
    """Returns the configuration of a dry run: not compiled, and with at most as many micro-batches as
    pipeline ranks hold at once."""
    held = 2 * args.pp if args.stages_per_rank > 1 else args.pp + 1
    micro_batches = min(args.gradient_accumulation_steps, held if args.pp > 1 else 2)
    return with_micro_batches(args.replace(compile=False, distributed_backend="nccl"), micro_batches)


def without_pipeline(args: NeoXArgs) -> NeoXArgs:
    """Returns the configuration with one pipeline rank, on so many ranks fewer."""
    assert args.world_size is not None
    return args.replace(
        pipe_parallel_size=1, pipeline_schedule="1f1b", virtual_pipeline_stages=None, pipeline_layers=None,
        train_batch_size=None, train_micro_batch_size_per_gpu=args.train_micro_batch_size_per_gpu,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    ).for_world(args.world_size // max(args.pp, 1))  # fmt: skip


def with_micro_batches(args: NeoXArgs, number: int) -> NeoXArgs:
    """Returns the configuration with another number of micro-batches in a step, on as many ranks."""
    assert args.world_size is not None
    size = args.train_micro_batch_size_per_gpu
    return args.replace(
        train_batch_size=None, train_micro_batch_size_per_gpu=size, gradient_accumulation_steps=number
    ).for_world(args.world_size)


def _run_rank(args_json: str, rank: int) -> RankReport:
    from megatron.planning.dry_run import run_rank  # imports torch, which must find the library

    return run_rank(NeoXArgs.from_json(args_json), rank)


def _trace(place: tuple[str, int]) -> Trace:
    from megatron.planning.dry_run import line_of  # imports torch, which must find the library
    from megatron.planning.tracing import trace_step

    try:
        return trace_step(NeoXArgs.from_json(place[0]), place[1])
    except Exception as problem:
        line = f"a planned step fails: {type(problem).__name__}: {problem} ({line_of(problem)})"
        raise StepError(line) from problem
