"""Chooses ranks that stand for all ranks of a run, and runs them in processes with fake CUDA."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.planning.fake_cuda import shim
from megatron.planning.report import RankReport


class PlanError(UserError):
    """Raised if this machine cannot plan a run."""


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


def run_ranks(args: NeoXArgs, ranks: Sequence[int], processes: int) -> Iterator[RankReport]:
    """Yields the report of each rank, in the order of `ranks`, as soon as it is there.

    args: with the world size, the vocabulary and few micro-batches resolved. processes: run ranks side by
    side.
    Raises PlanError if there can be no fake CUDA here, or a process dies.
    """
    if (reason := shim.lacking()) is not None:
        raise PlanError(reason)
    context, number = multiprocessing.get_context("spawn"), min(processes, len(ranks))
    with ProcessPoolExecutor(number, context, _begin_process, (shim.build(),)) as pool:
        try:
            yield from pool.map(partial(_run_rank, args.to_json()), ranks)
        except BrokenProcessPool:
            message = f"a process that ran ranks has died; is memory short? use --processes {number // 2 or 1}"
            raise PlanError(message) from None


def _begin_process(library: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    os.environ["DS_ACCELERATOR"] = "cpu"
    shim.preload(library)


def _follow(parent: int) -> None:
    """Ends this process soon after its parent, which may end without a word to it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _run_rank(args_json: str, rank: int) -> RankReport:
    from megatron.planning.dry_run import run_rank  # imports torch, which must find the library

    return run_rank(NeoXArgs.from_json(args_json), rank)
