"""Composes the time and the memory of a step from a trace of a few blocks, for all stages of the pipeline."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from megatron.data import rows_per_sample
from megatron.model.pipeline_partition import StagePlacement, partition_layers
from megatron.model.specs import LayerSpec
from megatron.neox_arguments import NeoXArgs
from megatron.planning.kinds import stand_in_places, traced_places
from megatron.planning.machines import Machine
from megatron.planning.operations import DATA_AXES, Operation, Segment, Trace
from megatron.planning.processes import Processes
from megatron.planning.ranks import strides, trace_steps, traced_args, without_pipeline
from megatron.planning.traffic import Traffic, sent_bytes
from megatron.training.native.pipeline_schedule import Action, action_tables
from megatron.training.native.schedule_report import timeline

_COMPUTE = ("products", "attention", "memory-bound")


class Pass(NamedTuple):
    """A pass of a micro-batch through a layer.

    trace: number of the trace that has it. place: of the micro-batch in its step, "first", "middle" or
        "last".
    """

    trace: int
    layer: int
    phase: str
    place: str


class Seconds(dict[str, float]):
    """Seconds by part; of a part that is not in it, 0."""

    def __missing__(self, part: str) -> float:
        return 0.0

    def add(self, seconds: Mapping[str, float]) -> None:
        for part, value in seconds.items():
            self[part] += value

    def total(self) -> float:
        return sum(self.values())


class StepTime(NamedTuple):
    """Seconds of a step.

    parts: of the busiest pipeline rank: products, attention, memory-bound operations, communication by axis
        that other work does not hide, update, and idle time of the pipeline; their sum is `seconds`.
    stages: for each pipeline rank, seconds in which it does not wait.
    """

    seconds: float
    parts: Mapping[str, float]
    stages: Sequence[float]


@dataclass(frozen=True)
class StepModel:
    """Predicts steps of a configuration on a machine.

    args: of the run, with the world size resolved.
    traces: of the pipeline ranks `kinds.traced_places`, or a single one of a run without pipeline stages.
    is_fused: memory-bound operations between two others run as one kernel, as in compiled blocks.
    """

    args: NeoXArgs
    traces: Sequence[Trace]
    machine: Machine
    is_fused: bool
    _costs: dict[Pass, Seconds] = field(default_factory=dict)
    _growths: dict[tuple[int, str, str], tuple[int, int]] = field(default_factory=dict)

    def on(self, machine: Machine) -> "StepModel":
        """Returns the model of the same steps on another machine."""
        model = copy(self)
        model.__dict__.update(machine=machine, _costs={})
        return model

    def trace_of(self, rank: int) -> int:
        """Returns the number of the trace that stands for a pipeline rank."""
        return 0 if len(self.traces) == 1 else self._stand_ins[rank]

    @cached_property
    def _stand_ins(self) -> list[int]:
        return stand_in_places(self.args)

    @cached_property
    def placement(self) -> StagePlacement:
        return StagePlacement.configured(self.args, self.args.pp)

    @cached_property
    def stages(self) -> list[tuple[LayerSpec, ...]]:
        return partition_layers(self.args, self.placement.stages)

    @cached_property
    def tables(self) -> list[list[Action]]:
        """The passes of each pipeline rank."""
        return action_tables(self.args, self.placement, self.args.gradient_accumulation_steps)

    @cached_property
    def _traced(self) -> Mapping[int, int]:
        """For each layer, the one that stands for it in the trace of its pipeline rank.

        The first two blocks of a stage and its last are those of the trace, where they are of its kind.
        """
        result: dict[int, int] = {}
        for rank in range(self.placement.ranks):
            trace = self.traces[self.trace_of(rank)]
            for chunk, stage in enumerate(self.placement.stages_of(rank)):
                specs = self.stages[stage]
                traced = [i for i in trace.chunks[min(chunk, len(trace.chunks) - 1)] if i in trace.kinds]
                result |= {spec.index: spec.index for spec in specs}
                result |= _stand_ins([s.index for s in specs if s.kind == "block"], traced, trace)
        return result

    @cached_property
    def segments(self) -> Mapping[Pass, Segment]:
        """The segments of the traces, which have one micro-batch, two or more."""
        result = {}
        for number, trace in enumerate(self.traces):
            segments = {(s.layer, s.phase, s.micro_batch): s for s in trace.segments if s.phase != "update"}
            last = max(micro_batch for *_, micro_batch in segments)
            for layer, phase, micro_batch in segments:
                # Of two micro-batches, the second gathers in forward what each but the first does.
                middle = 1 if last > 1 else last if phase == "forward" else 0
                for place, preferred in (("first", 0), ("middle", middle), ("last", last)):
                    # Some schedules divide only some backwards.
                    segment = segments.get((layer, phase, preferred), segments[layer, phase, micro_batch])
                    result[Pass(number, layer, phase, place)] = segment
        return result

    @cached_property
    def _has_stages(self) -> bool:
        """Whether the traces are of the run's pipeline ranks, not of a run with a single one."""
        return self.placement.ranks == 1 or len(self.traces) > 1

    @cached_property
    def _divides_backward(self) -> bool:
        """Whether the traces divide a backward as the schedule does. Without pipeline stages they do not."""
        return any(place.phase == "backward_input" for place in self.segments)

    # -- time ------------------------------------------------------------------------------------------------

    def cost(self, place: Pass) -> Seconds:
        """Returns the seconds of a pass through a layer, by part."""
        if place not in self._costs:
            segment = self.segments.get(place)
            self._costs[place] = Seconds() if segment is None else self._cost(segment)
        return self._costs[place]

    def _cost(self, segment: Segment, scale: float = 1.0) -> Seconds:
        """Returns seconds by part. Messages between stages are not in it: `timeline` has them.

        scale: of the bytes of memory-bound operations and of collectives over data ranks.
        """
        seconds = Seconds()
        for operation in segment.operations:
            part = self._part(operation)
            if part in ("memory-bound", *DATA_AXES):
                operation = operation._replace(size=scale * operation.size)
            if self.args.tf32 and operation.dtype == "float32":
                operation = operation._replace(dtype="tf32")
            if part is not None and part != "pipe":
                seconds[part] += operation.times * self.machine.seconds(operation)
                seconds["host"] += operation.times * operation.launches * self.machine.reached.host
        return seconds

    def _part(self, operation: Operation) -> str | None:
        if operation.ranks:
            return operation.axis
        if operation.kind in ("memory", "fused"):
            return "memory-bound" if (operation.kind == "fused") == self.is_fused else None
        return "attention" if operation.kind.startswith("attention") else "products"

    def stage_cost(self, stage: int, phase: str, place: str) -> Seconds:
        """Returns the seconds of a pass through a pipeline stage, by part, as far as nothing hides them.

        "data" is what a rank waits for, at its end, for weights to be gathered and gradients summed.
        """
        total = Seconds()
        for layer_pass in self._passes(stage, phase, place):
            total.add(self.cost(layer_pass))
        if phase == "backward_weight" and (segment := self._sum_segment(stage, place)) is not None:
            share = self._traced_share(stage)
            total.add({part: seconds / share for part, seconds in self._cost(segment).items()})
        return self._exposed(total)

    def _sum_segment(self, stage: int, place: str) -> Segment | None:
        """Returns the end of a pass for weights, which adds up the gradients of all the stage's layers."""
        trace = self.trace_of(self.placement.rank_of(stage))
        segments = (self.segments.get(Pass(trace, layer, "sum", place)) for layer in self._traced_chunk(stage))
        return next((segment for segment in segments if segment is not None), None)

    def _traced_chunk(self, stage: int) -> tuple[int, ...]:
        """Returns the layers that stand for a stage in the trace of its pipeline rank."""
        rank = self.placement.rank_of(stage)
        chunks = self.traces[self.trace_of(rank)].chunks
        return chunks[min(self.placement.stages_of(rank).index(stage), len(chunks) - 1)]

    def _traced_share(self, stage: int) -> float:
        """Returns the share of a stage's weights that its trace has."""
        sizes = self.traces[self.trace_of(self.placement.rank_of(stage))].layer_bytes
        weights = Counter({layer: parts["weights"] for layer, parts in sizes.items()})
        total = sum(weights[self._traced[spec.index]] for spec in self.stages[stage])
        return sum(weights[layer] for layer in self._traced_chunk(stage)) / total

    def _passes(self, stage: int, phase: str, place: str) -> list[Pass]:
        trace = self.trace_of(self.placement.rank_of(stage))
        return [Pass(trace, self._traced[spec.index], phase, place) for spec in self.stages[stage]]

    def _exposed(self, seconds: Seconds) -> Seconds:
        """Collectives over data ranks run beside other work, which takes longer for it."""
        busy = sum(seconds[part] for part in _COMPUTE)
        result = Seconds({part: value for part, value in seconds.items() if part not in DATA_AXES})
        data = sum(seconds[axis] for axis in DATA_AXES)
        if data:
            result["data"] = max(data - busy, 0.0) + self.machine.reached.overlap * min(data, busy)
        if "tensor" in result:
            result["tensor"] *= self.machine.reached.tensor
        for axis in [axis for axis in result if axis.startswith("context")]:
            # Keys of the next heads, or of the next rank, arrive during attention.
            result[axis] = max(result[axis] / 4, result[axis] - seconds["attention"])
        host = result.pop("host", 0.0)
        if host > result.total():
            result["host"] = host - result.total()
        return result

    def step(self) -> StepTime:
        """Returns the time of a step."""
        costs: dict[tuple[int, str, str], Seconds] = {}

        def cost(action: Action) -> Seconds:
            key = action.stage, action.kind, self._place_of(action.micro_batch)
            if key not in costs:
                costs[key] = self._action_cost(*key)
            return costs[key]

        durations: dict[tuple[int, str, str], float] = {}

        def duration(action: Action) -> float:
            # A pass hands its result on before its gradients are summed over data ranks.
            key = action.stage, action.kind, self._place_of(action.micro_batch)
            if key not in durations:
                durations[key] = cost(action).total() - cost(action)["data"]
            return durations[key]

        result = timeline(self.tables, self.placement, duration, cache(self._message))
        ends, updates = [], [self._update(rank) for rank in range(self.placement.ranks)]
        for rank, table in enumerate(self.tables):
            begin, action = result.begins[rank][-1]
            idle = result.length - result.busy[rank]
            data = sum(cost(action)["data"] for action in table)
            ends.append(begin + duration(action) + max(data - idle / 2, 0.0))
        seconds = max(ends) + max(updates)  # the norm of the gradient is that of all ranks
        rank = max(range(self.placement.ranks), key=lambda i: result.busy[i] + updates[i])
        parts = Seconds()
        for action in self.tables[rank]:
            parts.add(cost(action))
        parts["update"] = updates[rank]
        if self.placement.ranks > 1:
            parts["pipeline"] = seconds - parts.total()
        return StepTime(seconds, dict(parts), [a + b for a, b in zip(result.busy, updates, strict=True)])

    def _place_of(self, micro_batch: int) -> str:
        if micro_batch == self.args.gradient_accumulation_steps - 1:
            return "last"
        return "middle" if micro_batch else "first"

    def _action_cost(self, stage: int, kind: str, place: str) -> Seconds:
        seconds = self.stage_cost(stage, kind, place)
        if kind not in ("backward_input", "backward_weight") or self._divides_backward:
            return seconds
        # A trace without pipeline stages divides no backward: half of its products are for weights.
        seconds = self.stage_cost(stage, "backward", place)
        half = seconds["products"] / 2
        return Seconds(products=half) if kind == "backward_weight" else Seconds({**seconds, "products": half})

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        assert self.args.train_batch_size is not None
        return self.args.train_batch_size * rows_per_sample(self.args) * self.args.seq_length

    @property
    def hidden_bytes(self) -> int:
        """The bytes of a micro-batch's hidden states, on one rank."""
        args = self.args
        rows = args.train_micro_batch_size_per_gpu * rows_per_sample(args)
        rows = rows * args.seq_length // args.context_parallel_size
        rows //= args.tp if args.sequence_parallel else 1
        return rows * args.hidden_size * (4 if args.params_dtype == "fp32" else 2)

    def _message(self, source: int, target: int) -> float:
        """Returns the seconds of a message between two pipeline ranks."""
        distance, _ = strides(self.args)["pipe"]
        return self.machine.collective_seconds("send", self.hidden_bytes, (source * distance, target * distance))

    def _update(self, rank: int) -> float:
        """Returns the seconds of the update of a pipeline rank, which moves as many bytes as its optimizer
        states need."""
        trace = self.traces[self.trace_of(rank)]
        traced = sum(sizes["optimizer states"] for sizes in trace.layer_bytes.values())
        scale = self.kept_parts(rank)["optimizer states"] / traced if traced else 1.0
        updates = [self._cost(segment, scale) for segment in trace.segments if segment.phase == "update"]
        return sum(self._exposed(update).total() for update in updates)

    # -- communication ---------------------------------------------------------------------------------------

    def traffic(self, rank: int) -> list[Traffic]:
        """Returns what the first rank of a pipeline rank sends in a step, by axis and kind, largest first."""
        passes, per_node, number = Counter[Pass](), self.machine.gpus_per_node, self.trace_of(rank)
        for action in self.tables[rank]:
            passes.update(self._passes(action.stage, action.kind, self._place_of(action.micro_batch)))
        segments = [(self.segments.get(place), float(n), float(n)) for place, n in passes.items()]
        segments += [(segment, 1.0, 1.0) for segment in self.traces[number].segments if segment.phase == "update"]
        for action in (action for action in self.tables[rank] if action.kind == "backward_weight"):
            segment = self._sum_segment(action.stage, self._place_of(action.micro_batch))
            # Gradients of a block are summed together, and all others.
            groups, traced_groups = (
                len({layer if layer in self.traces[number].kinds else 0 for layer in layers})
                for layers in ([spec.index for spec in self.stages[action.stage]], self._traced_chunk(action.stage))
            )
            segments.append((segment, groups / traced_groups, 1 / self._traced_share(action.stage)))
        sums: dict[tuple[str, str, bool], tuple[float, float]] = {}
        for segment, times, sizes in segments:
            for operation in () if segment is None else segment.operations:
                if operation.ranks and operation.kind != "receive":
                    machines = {member // per_node for member in operation.ranks}
                    key = operation.axis, operation.kind, len(machines) == 1
                    calls, size = sums.get(key, (0.0, 0.0))
                    sent = operation.times * sent_bytes(operation)
                    sums[key] = calls + times * operation.times, size + sizes * sent
        rows = [Traffic(*key[:2], round(calls), size, key[2]) for key, (calls, size) in sums.items()]
        return sorted(rows, key=lambda row: -row.size)

    # -- memory ----------------------------------------------------------------------------------------------

    def layers_of(self, rank: int) -> list[LayerSpec]:
        """Returns the layers of a pipeline rank."""
        return [spec for stage in self.placement.stages_of(rank) for spec in self.stages[stage]]

    def kept_parts(self, rank: int) -> Counter[str]:
        """Returns the bytes that a pipeline rank holds between steps, by part."""
        trace, layers = self.traces[self.trace_of(rank)], self.layers_of(rank)
        traced = {layer for chunk in trace.chunks for layer in chunk}
        total: Counter[str] = Counter()
        for layer, sizes in trace.layer_bytes.items():
            if layer not in traced:  # the embedding, of which a last stage with a tied head holds a copy
                total.update(sizes)
        for spec in layers:
            total.update(trace.layer_bytes.get(self._traced[spec.index], {}))
        return total

    def memory(self, rank: int) -> "Memory":
        """Returns the memory of a pipeline rank, by adding what each pass of each layer takes and gives
        back."""
        parts, trace = self.kept_parts(rank), self.traces[self.trace_of(rank)]
        traced = sum(sum(sizes.values()) for sizes in trace.layer_bytes.values())
        kept_bytes = parts.total() + trace.kept_bytes - traced
        peak = live = kept_bytes
        micro_batch_bytes = Counter[tuple[int, int]]()  # by passes of a stage and a micro-batch
        for action in self.tables[rank]:
            place = self._place_of(action.micro_batch)
            if self.placement.ranks == 1 and place == "middle":
                continue  # as the last one, but for gradients that are there
            highest, growth = self._growth(action.stage, action.kind, place)
            peak = max(peak, live + highest)
            if not self._has_stages and place == "middle" and action.kind in ("backward", "backward_weight"):
                growth = -micro_batch_bytes[action[1:]]  # there is no middle micro-batch in the trace
            elif action.kind == "backward_weight" and self._divides_backward:
                growth = self._left_bytes(action.stage, place) - micro_batch_bytes[action[1:]]
            micro_batch_bytes[action[1:]] += growth
            live += growth
        return Memory(dict(parts), kept_bytes, peak)

    def _growth(self, stage: int, kind: str, place: str) -> tuple[int, int]:
        """Returns the bytes that a pass through a stage adds to the memory at most, and at its end."""
        key = stage, kind, place
        if kind.startswith("backward_") and not self._divides_backward:
            highest, growth = self._growth(stage, "backward", place)
            return (highest, 0) if kind == "backward_input" else (0, growth)
        if key not in self._growths:
            highest = growth = 0
            passes = self._passes(*key)
            for layer_pass in passes if kind == "forward" else reversed(passes):
                segment = self.segments.get(layer_pass)
                if segment is not None:
                    highest = max(highest, growth + segment.peak_bytes - segment.begin_bytes)
                    growth += segment.end_bytes - segment.begin_bytes
            self._growths[key] = highest, growth
        return self._growths[key]

    def _left_bytes(self, stage: int, place: str) -> int:
        """Returns the bytes that a micro-batch leaves on a stage after a divided backward.

        They are buffers of gradients and gathered weights, as in the trace for each weight. The end of the
        last pass frees what all layers hold, so that layers cannot be added up.
        """
        trace = self.trace_of(self.placement.rank_of(stage))
        layers, kinds = self._traced_chunk(stage), ("forward", "backward_input", "backward_weight", "sum")
        segments = (self.segments.get(Pass(trace, layer, kind, place)) for layer in layers for kind in kinds)
        left = sum(segment.end_bytes - segment.begin_bytes for segment in segments if segment is not None)
        return round(left / self._traced_share(stage))


class Memory(NamedTuple):
    """Bytes of a pipeline rank: by part and in total between steps, and at most in a step."""

    parts: Mapping[str, int]
    kept_bytes: int
    step: int


def build_models(
    configurations: Sequence[NeoXArgs], machine: Machine, processes: Processes, has_stages: bool = True
) -> list[StepModel]:
    """Returns a model of each configuration, which has the world size and the vocabulary. Traces run side by
    side.

    has_stages: False: one step without pipeline stages stands for all stages, which is faster.
    """
    traced = [traced_args(args if has_stages else without_pipeline(args)) for args in configurations]
    ranks = [traced_ranks(args) for args in traced]
    places = [(args, rank) for args, all_ranks in zip(traced, ranks, strict=True) for rank in all_ranks]
    traces = trace_steps(places, processes) if places else iter(())
    return [
        StepModel(args, [next(traces) for _ in all_ranks], machine, is_fused=args.compile is not False)
        for args, all_ranks in zip(configurations, ranks, strict=True)
    ]


def traced_ranks(args: NeoXArgs) -> list[int]:
    """Returns the first rank of each pipeline rank in `traced_places`."""
    distance, _ = strides(args)["pipe"]
    return [place * distance for place in traced_places(args)]


def _stand_ins(blocks: Sequence[int], traced: Sequence[int], trace: Trace) -> dict[int, int]:
    """Returns for each block of a stage the one that stands for it. traced: blocks of that stage's trace."""
    kinds, result = trace.kinds, {}
    everywhere = [layer for chunk in trace.chunks for layer in chunk if layer in kinds]
    for place, block in enumerate(blocks):
        ends = traced[place : place + 1] if place < 2 else traced[-1:] if block == blocks[-1] else []
        choices = [*ends, *reversed(traced[2:-1]), *traced, *everywhere]
        result[block] = next(layer for layer in choices if kinds[layer] == kinds[block])
    return result
