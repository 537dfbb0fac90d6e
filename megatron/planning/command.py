"""Runs `python deepy.py plan`: what ranks of a run need and send, from real steps on fake CUDA."""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.launch.environment import ProcessInfo
from megatron.launch.gpus import read_gpus
from megatron.neox_arguments import ConfigError, NeoXArgs, UserError
from megatron.neox_arguments.methods import method_name
from megatron.neox_arguments.neox_args import load_assignments
from megatron.neox_arguments.reading.files import parse_overrides
from megatron.neox_arguments.reading.presets import files_of
from megatron.planning.checks import problems
from megatron.planning.ranks import PlanError, ranks_of_axes, ranks_of_stages, run_ranks, strides
from megatron.planning.report import RankReport
from megatron.planning.size import ModelSize, model_size
from megatron.planning.traffic import Traffic, extrapolated, traffic
from megatron.process.command_parser import CommandParser

_GIB = 2**30
_UNPLANNED = {
    "zero_optimization": "memory of the host cannot be planned yet; leave out the offload sections",
    "lora": "quantized weights cannot be planned yet; leave out lora.quantization",
    "skip_step_above_sigma": "a step that depends on its loss cannot be planned; leave it out",
    "precision_fp8": "mxfp8 cannot be planned: the planned GPU has compute capability 9.0; set tensorwise or rowwise",
}
_EXAMPLES = """\
examples:
  python deepy.py plan configs/llama3-1/8B.yml --gpus 64            (memory of a rank of each pipeline stage)
  python deepy.py plan a.yml b.yml --gpus 64 --gpu h100 --json
  python deepy.py plan a.yml b.yml --dry-run-ranks 1024             (also: do ranks fit together?)
exit code: 0 when nothing is wrong, 1 when ranks do not fit together, or a step does not fit the memory
"""


@dataclass(frozen=True)
class Plan:
    """Facts of a run before it starts.

    micro_batches: of each data rank in the planned step, and in a real one. gpu_memory: bytes; None: unknown.
    sent: what the first rank sends in a real step.
    problems: what is wrong with the ranks; none: nothing was found. compares: whether ranks of all axes ran.
    """

    args: NeoXArgs
    size: ModelSize
    micro_batches: tuple[int, int]
    gpus_per_node: int
    gpu_memory: int | None
    reports: tuple[RankReport, ...]
    sent: tuple[Traffic, ...]
    problems: tuple[str, ...]
    compares: bool

    @property
    def failed(self) -> bool:
        """Whether a rank has not come to its end, so that sizes are unknown."""
        return any(report.error is not None for report in self.reports)

    @property
    def fits_memory(self) -> bool | None:
        """Whether steps and the construction fit the GPU; None: unknown."""
        if self.failed or self.gpu_memory is None:
            return None
        return all(max(r.step_bytes, r.construction_bytes) <= self.gpu_memory for r in self.reports)


def main(argv: Sequence[str], preset_root: Path) -> int:
    """Plans the run that the command line names, and prints the plan. Returns the exit code."""
    try:
        options = _parser().parse_intermixed_args(argv)
        plan = make_plan(options, preset_root)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("deepy.py plan"))
        return 1
    print(json.dumps(as_json(plan), indent=1) if options.json else "\n".join(lines(plan)))
    return 1 if plan.problems or plan.fits_memory is False else 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="deepy.py plan", epilog=_EXAMPLES,
        description="Tell what a run needs before it starts: parameters, FLOPs, memory of each stage, what ranks send. "
        "The real set-up and step run on fake tensors, so no GPU, data or checkpoint is needed. Blocks are not "
        "compiled: compiled ones keep fewer activations.",
    )  # fmt: skip
    add = parser.add_argument
    add("conf_file", nargs="+", help="configuration files, or names of presets")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys that override the files")
    add("--gpus", type=_positive, metavar="N", help="number of ranks; default: one machine")
    checks = "groups, layers, order of collectives, messages"
    add(
        "--dry-run-ranks",
        type=_positive,
        metavar="N",
        help=f"like --gpus; also check that ranks fit together: {checks}",
    )
    add("--gpus-per-node", type=_positive, default=8, metavar="N", help="GPUs of a machine; default: 8")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--gpu", choices=sorted(read_gpus()), metavar="NAME",
                        help=f"does a step fit this GPU? {', '.join(read_gpus())}")  # fmt: skip
    memory.add_argument("--gpu-memory", type=_gibibytes, metavar="GIB", help="does a step fit a GPU of this memory?")
    cores = os.cpu_count() or 1
    add(
        "--processes",
        type=_positive,
        default=cores,
        metavar="N",
        help="ranks that run side by side; default: all cores",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def _gibibytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def make_plan(options: argparse.Namespace, preset_root: Path) -> Plan:
    """Raises UserError if the configuration cannot be planned."""
    if options.gpus is not None and options.dry_run_ranks is not None:
        raise PlanError("--gpus and --dry-run-ranks both name the number of ranks; give one")
    files, _ = files_of(options.conf_file, preset_root=preset_root)
    args = load_assignments(files, parse_overrides(options.set, "--set")).check_planning()
    world = options.dry_run_ranks or options.gpus or options.gpus_per_node
    args, planned = planned_args(args, world, min(options.gpus_per_node, world))
    compares = options.dry_run_ranks is not None
    ranks = ranks_of_axes(planned) if compares else ranks_of_stages(planned)
    reports = []
    for report in run_ranks(planned, ranks, options.processes):
        reports.append(report)
        if sys.stderr.isatty():
            print(f"\rrank {len(reports)} of {len(ranks)}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    memory = options.gpu_memory if options.gpu is None else read_gpus()[options.gpu].memory
    micro_batches = planned.gradient_accumulation_steps, args.gradient_accumulation_steps
    sent, found_problems = _sent(args, planned, reports[0], options), problems(planned, reports)
    return Plan(
        args, model_size(args), micro_batches, options.gpus_per_node, None if memory is None else int(memory * _GIB),
        tuple(reports), tuple(sent), tuple(found_problems), compares,
    )  # fmt: skip


def _sent(args: NeoXArgs, planned: NeoXArgs, report: RankReport, options: argparse.Namespace) -> list[Traffic]:
    """Returns what a rank sends in a real step. A step with fewer micro-batches tells what each one adds."""
    rows = traffic(report, options.gpus_per_node)
    missing = args.gradient_accumulation_steps - planned.gradient_accumulation_steps
    if not missing or report.error is not None:
        return rows
    difference = args.pp if args.stages_per_rank > 1 else 1
    smaller = with_micro_batches(planned, planned.gradient_accumulation_steps - difference)
    [smaller_report] = run_ranks(smaller, [report.rank], 1)
    return extrapolated(rows, traffic(smaller_report, options.gpus_per_node), difference, missing)


def planned_args(args: NeoXArgs, world: int, gpus_per_node: int) -> tuple[NeoXArgs, NeoXArgs]:
    """Returns the configuration on `world` ranks, and that of the step that is planned.

    The planned step is not compiled, and has at most as many micro-batches as pipeline ranks hold at once.
    Raises ConfigError for what cannot be planned yet.
    """
    from megatron.mpu import check_experts, settle_context
    from megatron.tokenizer import build_tokenizer, with_vocabulary
    from megatron.training.offload import offload

    if args.engine == "deepspeed":
        raise args.error("engine", "deepspeed cannot be planned; set engine: native")
    if (name := method_name(args)) != "language_modelling":
        raise ConfigError([f"deepy.py plan: {name} cannot be planned yet; only language modelling and SFT"])
    for key, is_set in {
        "zero_optimization": any(offload(args, name) for name in ("offload_optimizer", "offload_param")),
        "lora": (args.user_values.get("lora") or {}).get("quantization") is not None,
        "skip_step_above_sigma": args.skip_step_above_sigma is not None,
        "precision_fp8": args.precision_fp8 == "mxfp8",
    }.items():
        if is_set:
            raise args.error(key, _UNPLANNED[key])
    if args.padded_vocab_size is None:
        args = with_vocabulary(args, build_tokenizer(args))
    args = args.for_world(world)
    process = ProcessInfo(0, world, 0, gpus_per_node, "localhost", 0, "alone")
    check_experts(args, process)
    args = settle_context(args, process, lambda line: print(line, file=sys.stderr))
    held = 2 * args.pp if args.stages_per_rank > 1 else args.pp + 1
    micro_batches = min(args.gradient_accumulation_steps, held if args.pp > 1 else 2)
    planned = args.replace(compile=False, distributed_backend="nccl")
    return args, with_micro_batches(planned, micro_batches)


def with_micro_batches(args: NeoXArgs, number: int) -> NeoXArgs:
    """Returns the configuration with another number of micro-batches in a step, on as many ranks."""
    assert args.world_size is not None
    size = args.train_micro_batch_size_per_gpu
    return args.replace(
        train_batch_size=None, train_micro_batch_size_per_gpu=size, gradient_accumulation_steps=number
    ).for_world(args.world_size)


# -- output --------------------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan for `--json`. Sizes are bytes."""
    ranks = [
        {"rank": r.rank, "coordinates": dict(r.coordinates), "layers": list(r.layers), **_memory(r), "notes": r.notes}
        for r in plan.reports
    ]
    planned, real = plan.micro_batches
    return {
        "model": plan.size._asdict(), "world_size": plan.args.world_size,
        "layout": {axis: size for axis, (_, size) in strides(plan.args).items()},
        "micro_batches": real, "planned_micro_batches": planned, "ranks": ranks,
        "sent": [row._asdict() for row in plan.sent], "gpu_memory": plan.gpu_memory, "fits": plan.fits_memory,
        "problems": list(plan.problems),
    }  # fmt: skip


def _memory(report: RankReport) -> Mapping[str, int]:
    names = {part: part.replace(" ", "_") for part in report.parts}
    return {**{names[part]: size for part, size in report.parts.items()}, "between_steps": report.kept_bytes,
            "construction": report.construction_bytes, "step": report.step_bytes}  # fmt: skip


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the plan for people."""
    args, size = plan.args, plan.size
    active, trained = f"{_count(size.active)} of them active for a token", f"{_count(size.trained)} trained"
    yield f"parameters: {_count(size.total)}, {active}, {trained}"
    yield (
        f"FLOPs of a step: {size.flops:.3g} exactly, {size.neox_flops:.3g} by GPT-NeoX's formula; "
        f"{_count(size.tokens)} tokens"
    )
    layout = " x ".join(f"{axis} {count}" for axis, (_, count) in strides(args).items() if count > 1)
    planned, real = plan.micro_batches
    copies = args.data_parallel_size * args.context_parallel_size
    zero = f"ZeRO {args.zero_stage}" if copies > 1 else "no ZeRO, as no ranks hold the same weights"
    yield f"layout: {_number(args.world_size, 'rank')}{f': {layout}' if layout else ''}; {zero}"
    steps = _number(planned, "micro-batch") + (f" (the run has {real})" if real > planned else "")
    yield f"planned: {_number(len(plan.reports), 'rank')}, each a step of {steps}, on compute capability 9.0"
    if not plan.failed:
        yield ""
        yield from _memory_lines(plan)
        yield ""
        yield from _sent_lines(plan)
    for note in dict.fromkeys(note for report in plan.reports for note in report.notes):
        yield f"note: {note}"
    yield from (f"problem: {problem}" for problem in plan.problems)
    if not plan.problems and plan.compares:
        yield f"{_number(len(plan.reports), 'rank')} compared: groups, layers, order of collectives, messages agree"


def _sent_lines(plan: Plan) -> Iterator[str]:
    yield f"rank {plan.reports[0].rank} sends in a step of {_number(plan.micro_batches[1], 'micro-batch')}:"
    rows = [
        (row.axis, row.kind, f"{row.calls:,}", f"{row.size / _GIB:.3f}", "within" if row.is_local else "between")
        for row in plan.sent
    ]
    yield from _table(("to ranks along", "collective", "calls", "GiB", "machines"), rows)


def _memory_lines(plan: Plan) -> Iterator[str]:
    yield "memory in GiB, without what the allocator, CUDA and NCCL take:"
    parts = [part for part in plan.reports[0].parts]
    stages = {report.coordinates.get("pipe", 0): report for report in reversed(plan.reports)}
    rows = []
    for stage, report in sorted(stages.items()):
        other_bytes = report.kept_bytes - sum(report.parts.values())
        sizes = [report.parts.get(part, 0) for part in parts]
        columns = [
            *sizes,
            other_bytes,
            report.step_bytes - report.kept_bytes,
            report.step_bytes,
            report.construction_bytes,
        ]
        rows.append(
            (f"{stage}", f"{report.rank}", f"{len(report.layers)}", *(f"{size / _GIB:.2f}" for size in columns))
        )
    heads = ("stage", "rank", "layers", *parts, "other", "activations", "step", "construction")
    yield from _table(heads, rows)
    if plan.gpu_memory is not None:
        largest = max(report.step_bytes for report in plan.reports)
        verdict = "fits" if plan.fits_memory else "does not fit"
        yield f"the largest step, {largest / _GIB:.2f} GiB, {verdict} {plan.gpu_memory / _GIB:.2f} GiB"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for row in (heads, *rows):
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _number(count: int | None, unit: str) -> str:
    ending = "" if count == 1 else "es" if unit.endswith("batch") else "s"
    return f"{count} {unit}{ending}"


def _count(number: float) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"
