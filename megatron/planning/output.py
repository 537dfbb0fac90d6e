"""Shows a plan as text and as JSON."""

import json
from collections.abc import Iterator
from typing import Any

from megatron.planning.explain import Explained, value_of
from megatron.planning.plan import GIB, Plan
from megatron.planning.ranks import strides
from megatron.planning.search import SPARE, Rejection, Search
from megatron.planning.ways import Way
from megatron.process.text_tables import Section, Table, table_lines

_MOST_LAYOUTS = 8
# What a run must share with its plan, besides layout and batch (`plan_file`).
_SETTINGS = (
    "num_layers", "hidden_size", "seq_length", "precision", "precision_fp8", "zero_optimization.stage",
    "expert_parallel_size", "sequence_parallel", "pipeline_schedule", "checkpoint_activations",
    "recompute_granularity", "train_impl",
)  # fmt: skip
_LONGEST_REASON = 100
# What parts of a step are called; the others are collectives by axis that other work does not hide.
_PARTS = {
    "products": "products", "attention": "attention", "memory-bound": "memory-bound operations",
    "host": "waiting for the host", "update": "update of the weights", "pipeline": "waiting for other pipeline ranks",
}  # fmt: skip


_ESTIMATED_PARTS = ("computation", "recomputation", "communication: tensor", "communication: data",
                    "communication: expert, context")  # fmt: skip


def part_name(part: str) -> str:
    """Returns what a part of a step's time is called."""
    return _PARTS.get(part, f"communication: {part}")


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan for `--json`. Sizes are bytes, times seconds."""
    args = plan.args
    stages = [
        {"rank": stage.rank, "layers": list(stage.layers), "between_steps": stage.memory.kept_bytes,
         "step": stage.memory.step, **{part.replace(" ", "_"): size for part, size in stage.memory.parts.items()}}
        for stage in plan.stages
    ]  # fmt: skip
    time = None if plan.time is None else {**plan.time._asdict(), **run_facts(plan)}
    return {
        "model": plan.size._asdict(), "world_size": args.world_size,
        "layout": {axis: size for axis, (_, size) in strides(args).items()},
        "settings": {key: value_of(args, key) for key in _SETTINGS},
        "micro_batches": args.gradient_accumulation_steps, "stages": stages, "time": time,
        "goodput": None if plan.goodput is None else plan.goodput._asdict(),
        "sent": [row._asdict() for row in plan.sent], "gpu_memory": plan.gpu_memory, "fits": plan.fits_memory,
        "ways": None if plan.ways is None else [way._asdict() for way in plan.ways],
        "explained": None if plan.explained is None else [_explained_facts(row) for row in plan.explained],
        "search": None if plan.search is None else _search_facts(plan.search),
        "notes": list(plan.notes), "compared_ranks": [report.rank for report in plan.reports],
        "problems": list(plan.problems),
    }  # fmt: skip


def _explained_facts(row: Explained) -> dict[str, Any]:
    way = None if row.way is None else row.way._asdict()
    return {"value": row.value, "way": way, "refusal": row.refusal}


def _search_facts(search: Search) -> dict[str, Any]:
    return {
        "estimated": search.estimated, "recorded": search.recorded, "planned": search.planned,
        "layouts": [
            {"layout": layout._asdict(), **way._asdict()}
            for layout, way in zip(search.layouts, search.best, strict=True)
        ],
        "rejected": [rejection._asdict() for rejection in search.rejections],
    }  # fmt: skip


def run_facts(plan: Plan) -> dict[str, float]:
    """Returns what follows from the time of a step: rates, and time, energy and price of the run."""
    assert plan.time is not None and plan.args.world_size is not None
    seconds, gpus, gpu = plan.time.seconds, plan.args.world_size, plan.machine.gpu
    peak = gpu.bf16 if plan.args.precision_fp8 in (None, "off") else gpu.fp8
    if plan.args.params_dtype == "fp32" and gpu.fp32:
        peak = gpu.fp32
    hours = seconds * plan.args.train_iters / 3600 if plan.args.train_iters else None
    facts = {
        "tokens_per_s_per_gpu": plan.size.tokens / seconds / gpus,
        "tflops_per_gpu": plan.size.flops / seconds / gpus / 1e12,
        "share_of_peak": plan.size.flops / seconds / gpus / (peak * 1e12),
    }  # fmt: skip
    if hours is None:
        return facts
    facts |= {"days": hours / 24, "gpu_hours": hours * gpus, "mwh": hours * gpus * gpu.power / 1e6}
    return facts if plan.price is None else {**facts, "price": hours * gpus * plan.price}


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the plan for people."""
    yield from facts(plan)
    for section in sections(plan):
        yield ""
        for item in section.items:
            yield from table_lines(item) if isinstance(item, Table) else [item]
    yield from (f"note: {note}" for note in plan.notes)
    yield from (f"problem: {problem}" for problem in plan.problems)
    if not plan.problems and plan.reports:
        yield f"{_number(len(plan.reports), 'rank')} compared: groups, layers, order of collectives, messages agree"


def facts(plan: Plan) -> Iterator[str]:
    """Yields lines about the model and its layout."""
    args, size = plan.args, plan.size
    active, trained = (
        f"{readable_count(size.active)} of them active for a token",
        f"{readable_count(size.trained)} trained",
    )
    yield f"parameters: {readable_count(size.total)}, {active}, {trained}"
    yield (
        f"FLOPs of a step: {size.flops:.3g} exactly, {size.neox_flops:.3g} by GPT-NeoX's formula; "
        f"{readable_count(size.tokens)} tokens"
    )
    layout = " x ".join(f"{axis} {count}" for axis, (_, count) in strides(args).items() if count > 1)
    copies = args.data_parallel_size * args.context_parallel_size
    zero = f"ZeRO {args.zero_stage}" if copies > 1 else "no ZeRO, as no ranks hold the same weights"
    steps = _number(args.gradient_accumulation_steps, "micro-batch")
    yield f"layout: {_number(args.world_size, 'rank')}{f': {layout}' if layout else ''}; {zero}; {steps} a step"


def sections(plan: Plan) -> Iterator[Section]:
    """Yields the parts of the plan, for text and page alike."""
    yield Section("Memory", list(_memory_items(plan)))
    yield Section("Bytes sent", list(_sent_items(plan)))
    if plan.time is not None:
        yield Section("Seconds of a step", list(_time_items(plan)))
    if plan.explained:
        yield Section(f"Values of {plan.explained_key}", list(_explained_items(plan)))
    if plan.search is not None:
        yield Section("Fastest layouts", list(_search_items(plan, plan.search)))


def _time_items(plan: Plan) -> Iterator[str | Table]:
    assert plan.time is not None
    facts, machine, args = run_facts(plan), plan.machine, plan.args
    rate, flops, share = (facts[name] for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "share_of_peak"))
    yield (
        f"a step takes {plan.time.seconds:.3g} s: {rate:,.0f} tokens/s on each GPU, {flops:.3g} TFLOP/s, "
        f"{share:.1%} of the peak"
    )
    parts = sorted(plan.time.parts.items(), key=lambda item: -item[1])
    rows = [
        (part_name(part), f"{seconds:.3g}", f"{seconds / plan.time.seconds:.1%}")
        for part, seconds in parts
        if seconds > 0.0
    ]
    yield Table(("of the busiest pipeline rank", "seconds", "share"), rows)
    if args.train_iters:
        energy = f"{facts['mwh']:.3g} MWh at {machine.gpu.power:,.0f} W" if machine.gpu.power else "energy unknown"
        price = f", price {facts['price']:,.2f}" if "price" in facts else ""
        yield (
            f"{args.train_iters:,} steps: {facts['days']:.3g} days, {facts['gpu_hours']:,.0f} GPU-hours, "
            f"{energy}{price}; without saves, evaluation and failures"
        )
    if plan.goodput is not None:
        steps, share, failure_interval = plan.goodput
        days = f"; the run takes {facts['days'] / share:.3g} days" if args.train_iters and share > 0.0 else ""
        yield (
            f"a machine fails every {failure_interval / 3600:.3g} hours: save every {_number(steps, 'step')} "
            f"({steps * plan.time.seconds / 60:.3g} minutes), and {share:.1%} of the time is useful{days}"
        )


def _sent_items(plan: Plan) -> Iterator[str | Table]:
    yield "rank 0 sends in a step:"
    rows = [
        (row.axis, row.kind, f"{row.calls:,}", f"{row.size / GIB:.3f}", "within" if row.is_local else "between")
        for row in plan.sent
    ]
    yield Table(("to ranks along", "collective", "calls", "GiB", "machines"), rows)


def _memory_items(plan: Plan) -> Iterator[str | Table]:
    yield "memory in GiB, without what the allocator, CUDA and NCCL take:"
    parts = list(plan.stages[0].memory.parts)
    rows = []
    for number, (rank, layers, memory) in enumerate(plan.stages):
        sizes = [memory.parts.get(part, 0) for part in parts]
        columns = [*sizes, memory.kept_bytes - sum(sizes), memory.step - memory.kept_bytes, memory.step]
        rows.append((f"{number}", f"{rank}", f"{len(layers)}", *(f"{size / GIB:.2f}" for size in columns)))
    yield Table(("stage", "rank", "layers", *parts, "other", "activations", "step"), rows)
    if plan.gpu_memory is not None:
        verdict = "fits" if plan.fits_memory else "does not fit"
        yield f"the largest step, {plan.step_bytes / GIB:.2f} GiB, {verdict} {plan.gpu_memory / GIB:.2f} GiB"
    if plan.ways is not None:
        yield from _way_items(plan)


def _search_items(plan: Plan, search: Search) -> Iterator[str | Table]:
    assert plan.time is not None
    if not search.best:
        counts = f"{search.estimated:,} estimated and {search.recorded} recorded"
        yield f"no layout leaves {SPARE:.0%} of the memory free: {counts}; take more GPUs"
        return
    yield (
        f"{search.estimated:,} layouts estimated, {search.recorded} recorded. The fastest planned that leave "
        f"{SPARE:.0%} of the memory free (as it is, a step takes {plan.time.seconds:.3g} s):"
    )
    columns = ("tensor", "sequence", "pipe", "context", "expert", "zero", "rows", "recompute", "schedule", "chunks")
    rows = []
    for layout, way in list(zip(search.layouts, search.best, strict=True))[:_MOST_LAYOUTS]:
        rows.append((f"{way.seconds:.3g}", f"{way.step_bytes / GIB:.1f}", *map(_value, layout)))
    yield Table(("seconds", "GiB", *columns), rows)
    if search.best[0].changes:
        yield f"to run the fastest: --set {_keys(search.best[0])}"
    else:
        yield "the layout of the configuration is the fastest"
    if not search.is_complete:
        yield "the search ended after enough plans; others may be faster"
    yield "why not otherwise, as estimated, or planned where it says so:"
    yield Table(
        ("key", "value", "the best layout with it"),
        [(row.key, _value(row.value), _reason(row)) for row in search.rejections],
        ends_in_text=True,
    )


def _reason(row: Rejection) -> str:
    if row.refusal is not None:
        return _first_line(row.refusal)
    if row.slower < 0.0:
        return f"may be {-row.slower:.0%} faster, not planned: the search ended after enough plans"
    part = row.part if row.part in _ESTIMATED_PARTS else part_name(row.part)
    return f"{row.slower:.0%} slower, most by {part}{' (planned)' if row.is_planned else ''}"


def _explained_items(plan: Plan) -> Iterator[str | Table]:
    """Yields a line for each value: memory, seconds, and the parts that change most."""
    assert plan.explained
    base = plan.explained[0].way
    assert base is not None
    rows = []
    for value, way, refusal in plan.explained:
        if way is None:
            rows.append((_value(value), "-", "-", "-", _first_line(refusal or "")))
            continue
        differences = {
            part: way.parts.get(part, 0.0) - base.parts.get(part, 0.0) for part in {**base.parts, **way.parts}
        }
        largest = sorted(differences, key=lambda part: -abs(differences[part]))[:3]
        changes = [f"{part_name(p)} {differences[p]:+.3g} s" for p in largest
                   if abs(differences[p]) > 0.002 * base.seconds]  # fmt: skip
        share = "" if way is base else f" ({way.seconds / base.seconds - 1:+.1%})"
        rate = f"{way.tokens / way.seconds / (plan.args.world_size or 1):,.0f}"
        seconds = f"{way.seconds:.3g}{share}"
        rows.append((_value(value), f"{way.step_bytes / GIB:.2f}", rate, seconds, ", ".join(changes)))
    is_equal = all(row.way is None or row.way.tokens == base.tokens for row in plan.explained)
    yield f"{plan.explained_key}{', with the same tokens in a step' if is_equal else ''}:"
    yield Table(("value", "GiB", "tokens/s of a GPU", "seconds", "what changes most"), rows, ends_in_text=True)


def _first_line(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + " ..."


def _keys(way: Way) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in way.changes.items())


def _way_items(plan: Plan) -> Iterator[str | Table]:
    assert plan.ways is not None and plan.time is not None
    if not plan.ways:
        yield "no way to fit it is found by one, two or three changes; take more GPUs, or others"
        return
    yield f"the cheapest ways to fit it, with the same global batch (as it is, a step takes {plan.time.seconds:.3g} s):"
    rows = []
    for way in plan.ways:
        rows.append((f"--set {_keys(way)}", f"{way.step_bytes / GIB:.2f}", f"{way.seconds:.3g}"))
    yield Table(("change", "GiB", "seconds"), rows)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(count: int | None, unit: str) -> str:
    ending = "" if count == 1 else "es" if unit.endswith("batch") else "s"
    return f"{count} {unit}{ending}"


def readable_count(number: float) -> str:
    """Returns a number as text, such as 8.03B."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"
