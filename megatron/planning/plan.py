"""Makes the plan of a run: what it needs, and how long it takes."""

import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron.neox_arguments import NeoXArgs
from megatron.planning.checks import problems
from megatron.planning.explain import Explained, explain, explained_values
from megatron.planning.goodput import Failures, Goodput, best_goodput
from megatron.planning.machines import Machine
from megatron.planning.processes import Processes
from megatron.planning.ranks import dry_run_args, ranks_of_axes, run_ranks, strides
from megatron.planning.report import RankReport
from megatron.planning.search import SPARE, Search, search
from megatron.planning.settled import settled_args
from megatron.planning.size import ModelSize, model_size
from megatron.planning.step_model import Memory, StepTime, build_models
from megatron.planning.traffic import Traffic
from megatron.planning.ways import Way, ways_out

GIB = 2**30


class StageMemory(NamedTuple):
    """The memory of the first rank of a pipeline rank. layers: that it holds."""

    rank: int
    layers: tuple[int, ...]
    memory: Memory


@dataclass(frozen=True)
class Plan:
    """Facts of a run before it starts.

    gpu_memory: bytes; None: unknown. time: of a step; None: no GPU is named. price: of a GPU for an hour.
    sent: what the first rank sends in a step. reports: of the ranks of a dry run.
    problems: what is wrong with them; none: nothing was found. goodput: with the failures that the user
        expects; None: none are named. ways: to fit the GPU's memory; None: they are
        not needed, or no GPU is named. search: the best layouts; None: nobody asks for them.
    explained: values of the key `explained_key`, that of the run first.
    """

    args: NeoXArgs
    size: ModelSize
    machine: Machine
    gpu_memory: int | None
    stages: tuple[StageMemory, ...]
    time: StepTime | None
    price: float | None
    sent: tuple[Traffic, ...]
    notes: tuple[str, ...]
    reports: tuple[RankReport, ...]
    problems: tuple[str, ...]
    goodput: Goodput | None
    ways: tuple[Way, ...] | None = None
    search: Search | None = None
    explained_key: str | None = None
    explained: tuple[Explained, ...] | None = None

    @property
    def step_bytes(self) -> int:
        """The largest memory of a stage in a step."""
        return max(stage.memory.step for stage in self.stages)

    @property
    def fits_memory(self) -> bool | None:
        """Whether steps, and the construction in a dry run, fit the GPU; None: unknown."""
        if self.gpu_memory is None:
            return None
        return max(self.step_bytes, *(report.construction_bytes for report in self.reports), 0) <= self.gpu_memory


def make_plan(
    args: NeoXArgs, world: int, machine: Machine, *, has_gpu: bool, gpu_memory: float | None, price: float | None,
    failures: Failures | None, processes: Processes, compares: bool,
    searches: bool = False, finds_ways: bool = True, explains: tuple[str, tuple[Any, ...]] | None = None,
) -> Plan:  # fmt: skip
    """Returns the plan of a run on `world` ranks.

    has_gpu: tell times on the machine's GPU. gpu_memory: in GiB; None: that GPU's, or unknown.
    explains: a key and values of it to plan too.
    searches: also look for the best layouts. finds_ways: look for changes by which a step fits.
    compares: also run ranks along every axis, and compare them.
    Raises UserError if the configuration cannot be planned.
    """
    args = settled_args(args, world, machine.gpus_per_node, lambda line: print(line, file=sys.stderr))
    if has_gpu and machine.gpu.fp8 == 0 and args.precision_fp8 not in (None, "off"):
        raise args.error("precision_fp8", "the named GPU has no FP8; write off, or name another with --gpu")
    if explains is not None:
        explains = explains[0], tuple(explained_values(args, *explains))
    [model] = build_models([args], machine, processes)
    planned = dry_run_args(args)
    reports = _dry_run(planned, processes) if compares else []
    if has_gpu and gpu_memory is None:
        gpu_memory = machine.gpu.memory
    distance, ranks = strides(args)["pipe"]
    stages = [
        StageMemory(rank * distance, tuple(spec.index for spec in model.layers_of(rank)), model.memory(rank))
        for rank in range(ranks)
    ]
    time = model.step() if has_gpu else None
    machines = -(-world // machine.gpus_per_node)
    goodput = None if time is None or failures is None else best_goodput(time.seconds, machines, failures)
    all_notes = [*(trace.notes for trace in model.traces), *(report.notes for report in reports)]
    notes = dict.fromkeys(note for part_notes in all_notes for note in part_notes)
    plan = Plan(
        args, model_size(args), machine, None if gpu_memory is None else int(gpu_memory * GIB), tuple(stages),
        time, price, tuple(model.traffic(0)), tuple(notes), tuple(reports),
        tuple(problems(planned, reports)) if reports else (), goodput,
    )  # fmt: skip
    if not has_gpu:
        return plan
    memory = plan.gpu_memory
    assert memory is not None
    if explains is not None:
        key, values = explains
        explained = tuple(explain(model, key, values, processes))
        plan = replace(plan, explained_key=key, explained=explained)
    if searches:
        return replace(plan, search=search(model, int((1 - SPARE) * memory), processes, _progress))
    if plan.fits_memory is not False or not finds_ways:
        return plan
    _progress("a step does not fit; changes by which it would are planned")
    return replace(plan, ways=tuple(ways_out(args, machine, memory, processes)))


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def _dry_run(planned: NeoXArgs, processes: Processes) -> list[RankReport]:
    """Returns the reports of ranks along every axis."""
    ranks, reports = ranks_of_axes(planned), list[RankReport]()
    for report in run_ranks(planned, ranks, processes):
        reports.append(report)
        if sys.stderr.isatty():
            ending = "\n" if len(reports) == len(ranks) else ""
            print(f"\rrank {len(reports)} of {len(ranks)}", end=ending, file=sys.stderr, flush=True)
    return reports
