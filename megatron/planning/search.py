"""Searches the fastest layouts that fit the memory of a GPU, with the same global batch.

Formulas order the layouts (`estimate`). Of the best a step is recorded, which corrects the formulas, until no
other promises more. Of pipelines, one stage stands for all until one is the fastest; it is then planned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

from megatron.neox_arguments import NeoXArgs, UserError
from megatron.planning.estimate import Estimate, Estimator, Layout
from megatron.planning.explain import value_of
from megatron.planning.processes import Processes, StepError
from megatron.planning.step_model import StepModel
from megatron.planning.ways import Way, changed_args, evaluated, way_of

SPARE = 0.08
"""The share of a GPU's memory that a search leaves free, for what is not counted: gaps, CUDA, NCCL."""
_MOST_RECORDED = 16  # layouts, because each takes a second
_LONG_ROWS = 16384  # tokens from which on context ranks are tried
_MOST_ROWS = 16  # of a micro-batch
# How much a difference counts, where the planned layout most like another one is looked for.
_DISTANCES = {"pipe": 2, "context": 2, "expert": 2, "zero": 3, "recompute": 4}
_WEIGHTS = tuple(_DISTANCES.get(field, 1) for field in Layout._fields)
_KEYS = {
    "tensor": "model_parallel_size", "sequence": "sequence_parallel", "pipe": "pipe_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_parallel_size", "zero": "zero_optimization.stage", "rows": "train_micro_batch_size_per_gpu",
    "recompute": "recompute_granularity", "schedule": "pipeline_schedule", "chunks": "virtual_pipeline_stages",
}  # fmt: skip


class Rejection(NamedTuple):
    """A value of a key that the best layout does not have, and the best of the layouts with it.

    slower: by this share of the best layout's seconds, most of it by `part`. is_planned: not by formulas.
    refusal: why no layout has the value; None: some have.
    """

    key: str
    value: Any
    slower: float = 0.0
    part: str = ""
    is_planned: bool = False
    refusal: str | None = None


class Search(NamedTuple):
    """The result of a search.

    estimated, recorded, planned: numbers of layouts; recorded are those with a recorded step, planned those
        with one of each kind of pipeline rank. best: of the planned, those that fit, fastest first. layouts:
        theirs. is_complete: no other layout promised to be faster at the end.
    """

    estimated: int
    recorded: int
    planned: int
    best: tuple[Way, ...]
    layouts: tuple[Layout, ...]
    rejections: tuple[Rejection, ...]
    is_complete: bool = True


def search(model: StepModel, gpu_memory: int, processes: Processes, log: Callable[[str], None]) -> Search:
    """Returns the layouts that are best for a run.

    model: of the run as it is configured. log: gets a line of progress for each round.
    """
    state = _Searching(model, gpu_memory, processes)
    while layouts := state.promising(max(2, processes.number)):
        log(f"{len(state.estimates)} layouts, {len(state.recorded)} recorded; recording {len(layouts)} more")
        state.plan(layouts)
    return state.result()


def changes_for(args: NeoXArgs, layout: Layout) -> dict[str, Any]:
    """Returns the keys of a layout that differ in the configuration, without those that have no effect."""
    changes = {key: value for key, value in layout.keys().items() if value != value_of(args, key)}
    if layout.pipe == max(args.pp, 1):
        changes.pop("pipe_parallel_size", None)  # 0 and 1 are the same
    if layout.pipe == 1:
        changes = {key: value for key, value in changes.items() if not key.startswith(("pipeline_", "virtual_"))}
    if layout.recompute == "none":
        changes.pop("recompute_granularity", None)
    return changes


def layouts_of(args: NeoXArgs, gpus_per_node: int) -> Iterator[Layout]:
    """Yields the layouts whose ranks and micro-batches divide those of the run."""
    assert args.world_size is not None and args.train_batch_size is not None
    with_context = args.seq_length >= _LONG_ROWS or args.context_parallel_size > 1
    contexts = [*_powers(16)] if with_context else [1]
    experts = [*_powers(args.moe_num_experts)] if args.moe_num_experts > 1 else [1]
    tensors = [n for n in _powers(min(gpus_per_node, args.num_attention_heads)) if args.num_attention_heads % n == 0]
    for tensor, pipe, context in product(tensors, _powers(args.num_layers), contexts):
        data, remainder = divmod(args.world_size, tensor * pipe * context)
        if remainder or data == 0:
            continue
        expert_ranks = [n for n in experts if data * context % n == 0 and args.moe_num_experts % n == 0]
        rows = [n for n in _powers(_MOST_ROWS) if args.train_batch_size % (n * data) == 0]
        zeros = (1, 2, 3) if data * context > 1 else (0,)
        for expert, zero, row, recompute in product(expert_ranks, zeros, rows, ("none", "selective", "full")):
            for schedule, chunks in _schedules(pipe, zero):
                yield Layout(tensor, tensor > 1, pipe, context, expert, zero, row, recompute, schedule, chunks)


def _powers(limit: int) -> Iterator[int]:
    """Yields the powers of two up to `limit`."""
    number = 1
    while number <= limit:
        yield number
        number *= 2


def _schedules(pipe: int, zero: int) -> list[tuple[str, int]]:
    if pipe == 1:
        return [("1f1b", 1)]
    return [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), *([("zero_bubble", 1)] if zero < 2 else [])]


class _Searching:
    """The state of a search: what is estimated, planned and refused so far."""

    def __init__(self, model: StepModel, gpu_memory: int, processes: Processes) -> None:
        self._args, self._machine, self._processes = model.args, model.machine, processes
        self._gpu_memory = gpu_memory
        estimator = Estimator(model.args, model.machine)
        self._base = Layout.configured(model.args)
        layouts = dict.fromkeys([self._base, *layouts_of(model.args, model.machine.gpus_per_node)])
        self.estimates = {layout: estimator.estimate(layout) for layout in layouts}
        self.ways = {self._base: way_of({}, model)}
        self.recorded: dict[Layout, Way] = {}  # those planned, and pipelines of which one stage stands for all
        self._nearest: dict[Layout, tuple[float, Layout]] = {}  # of those recorded, and how far it is
        self._record(self._base, self.ways[self._base])
        self._refused: dict[Layout, str] = {}

    def plan(self, layouts: Sequence[Layout]) -> None:
        """Plan layouts from recorded steps; of pipelines all stages only the second time."""
        self._plan([layout for layout in layouts if self._needs_stages(layout)], True)
        self._plan([layout for layout in layouts if not self._needs_stages(layout)], False)

    def _needs_stages(self, layout: Layout) -> bool:
        return layout.pipe == 1 or layout in self.recorded

    def _plan(self, layouts: Sequence[Layout], has_stages: bool) -> None:
        changes = [self._changes(layout) for layout in layouts]
        try:
            ways = evaluated(self._args, changes, self._machine, self._processes, has_stages)
        except StepError as problem:  # of one of them, which alone is refused
            if len(layouts) == 1:
                self._refused[layouts[0]] = str(problem)
            else:
                for layout in layouts:
                    self._plan([layout], has_stages)
            return
        for layout, way in zip(layouts, ways, strict=True):
            self._record(layout, way)
            if has_stages:
                self.ways[layout] = way

    def _record(self, recorded: Layout, way: Way) -> None:
        """Add a recorded layout, which corrects the estimates of those like it."""
        self.recorded[recorded] = way
        for layout in self.estimates:
            distance = _distance(recorded, layout)
            if layout not in self._nearest or distance < self._nearest[layout][0]:
                self._nearest[layout] = distance, recorded

    def promising(self, number: int) -> list[Layout]:
        """Returns layouts that may be faster than those planned, best first; none if there are none."""
        return list(islice(self._faster(), number)) if len(self.recorded) < _MOST_RECORDED else self._best_recorded()

    def _faster(self) -> Iterator[Layout]:
        """Yields layouts that are allowed, not recorded, and seem to fit and to be faster, best first.

        If there are none, it yields the best of the recorded layouts, if that is not planned.
        """
        ways = [way for way in self.recorded.values() if self._is_small(way.step_bytes)]
        limit = min((way.seconds for way in ways), default=float("inf"))
        seconds = {layout: self._corrected(layout) for layout in self.estimates if layout not in self.recorded}
        fast = (layout for layout, value in seconds.items() if value.seconds < limit and self._is_small(_memory(value)))
        allowed = filter(self._is_allowed, sorted(fast, key=lambda layout: seconds[layout].seconds))
        if (layout := next(allowed, None)) is None:
            yield from self._best_recorded()
        else:
            yield from (layout, *allowed)

    def _best_recorded(self) -> list[Layout]:
        """Returns the fastest recorded layout that fits, if it is not planned."""
        fitting = [layout for layout, way in self.recorded.items() if self._is_small(way.step_bytes)]
        best = min(fitting, key=lambda layout: self.recorded[layout].seconds, default=None)
        return [] if best is None or best in self.ways or not self._is_allowed(best) else [best]

    def result(self) -> Search:
        fitting = {layout: way for layout, way in self.ways.items() if self._is_small(way.step_bytes)}
        order = sorted(fitting, key=lambda layout: fitting[layout].seconds)
        rejections = tuple(self._rejections(order[0])) if order else ()
        best = tuple(fitting[layout] for layout in order)
        is_complete = next(self._faster(), None) is None
        counts = len(self.estimates), len(self.recorded), len(self.ways)
        return Search(*counts, best, tuple(order), rejections, is_complete)

    def _is_small(self, size: float) -> bool:
        return size <= self._gpu_memory

    def _changes(self, layout: Layout) -> dict[str, Any]:
        """Returns the keys by which a layout differs from the configuration."""
        changes = changes_for(self._args, layout)
        if layout.expert * layout.tensor > self._machine.gpus_per_node and not self._args.expert_parallel_across_nodes:
            changes["expert_parallel_across_nodes"] = layout.expert > 1
        return changes

    def _is_allowed(self, layout: Layout) -> bool:
        if layout not in self._refused:
            try:
                changed_args(self._args, self._changes(layout), self._machine)
            except UserError as problem:
                self._refused[layout] = str(problem)
        return layout not in self._refused

    def _corrected(self, layout: Layout) -> Estimate:
        """Returns the estimate, corrected by the recorded layout that is most like it."""
        _, nearest = self._nearest[layout]
        way, estimate, raw = self.recorded[nearest], self.estimates[nearest], self.estimates[layout]
        slower, larger = way.seconds / estimate.seconds, way.step_bytes / _memory(estimate)
        parts = {part: slower * value for part, value in raw.parts.items()}
        return Estimate(parts, larger * raw.states, larger * raw.activations)

    def _rejections(self, best: Layout) -> Iterator[Rejection]:
        """Yields for each key the values that the best layout lacks, and why."""
        estimates = {layout: self._corrected(layout) for layout in self.estimates}
        for field, key in _KEYS.items():
            for value in dict.fromkeys(getattr(layout, field) for layout in estimates):
                if value != getattr(best, field):
                    layouts = [layout for layout in estimates if getattr(layout, field) == value]
                    yield self._rejection(key, value, layouts, estimates, best)

    def _rejection(
        self, key: str, value: Any, layouts: Sequence[Layout], estimates: Mapping[Layout, Estimate], best: Layout
    ) -> Rejection:
        """Returns why none of these layouts is the best."""
        fitting = [layout for layout in layouts if self._seems_small(layout, estimates)]
        if not fitting:
            smallest = min(_memory(estimates[layout]) for layout in layouts)
            return Rejection(key, value, refusal=f"does not fit: needs about {smallest / 2**30:.0f} GiB")
        seconds = {x: self.ways[x].seconds if x in self.ways else estimates[x].seconds for x in fitting}
        layout = next(
            (layout for layout in sorted(fitting, key=lambda x: seconds[x]) if self._is_allowed(layout)), None
        )
        if layout is None:
            return Rejection(key, value, refusal=self._refused[fitting[0]])
        is_planned = layout in self.ways
        parts = dict(self.ways[layout].parts) if is_planned else estimates[layout].parts
        best_parts = self.ways[best].parts if is_planned else estimates[best].parts
        differences = {part: size - best_parts.get(part, 0.0) for part, size in parts.items()}
        slower = seconds[layout] / self.ways[best].seconds - 1
        return Rejection(key, value, slower, max(differences, key=lambda part: differences[part]), is_planned)

    def _seems_small(self, layout: Layout, estimates: Mapping[Layout, Estimate]) -> bool:
        way = self.ways.get(layout)
        return self._is_small(_memory(estimates[layout]) if way is None else way.step_bytes)


def _memory(estimate: Estimate) -> float:
    return estimate.states + estimate.activations


def _distance(a: Layout, b: Layout) -> int:
    """Pipelines and tensor ranks differ from none more than in their numbers."""
    distance = sum(weight for weight, x, y in zip(_WEIGHTS, a, b, strict=True) if x != y)
    return distance + 4 * ((a.pipe > 1) != (b.pipe > 1)) + 2 * ((a.tensor > 1) != (b.tensor > 1))
