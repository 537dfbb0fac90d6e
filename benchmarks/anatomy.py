"""Shows how a training step spends its time: every kernel by kind, with its floor; the largest gaps first.

Steps run one behind the other under torch's profiler, on one device. The kinds must add up to the step, which
other clocks time; where they are off by more than 2 %, that is an error. With --fake it counts what a step
asks for on a GPU that is not there, beside floors at given rates, and times nothing.

A floor is the larger of FLOPs over the rate of matrix products (twice that in FP8) and of bytes over the
rate of copies, each operand met in memory once. It is an estimate: a trace does not say what is written in
place, how large a result is, or which places documents leave out of attention.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_work import WorkRow, totals_by_kind
from megatron.process import run_command
from megatron.process.command_parser import CommandParser


def table(rows: Sequence[WorkRow], max_rows: int = 40) -> str:
    """Returns a Markdown table: the sum of each kind of work, then the `max_rows` first rows."""
    total_s = sum(row.seconds for row in rows)

    def line(row: WorkRow, name: str) -> str:
        floor = "-" if row.floor is None else f"{row.floor * 1e3:.2f}"
        excess = "-" if row.floor is None else f"{row.above_floor * 1e3:.2f}"
        share = row.seconds / (total_s or 1)
        return (
            f"| {name} | {row.calls:.0f} | {row.seconds * 1e3:.2f} | {share:.1%} | {floor} | {excess} | "
            f"{row.flops / 1e12:.2f} | {row.bytes / 1e9:.2f} |"
        )

    head = ["| | calls | ms | of the step | floor, ms | above it, ms | TFLOP | GB |", "|---|" + "---:|" * 7]
    kinds = [line(row, f"**{row.kind}**") for row in totals_by_kind(rows)]
    return "\n".join([*head, *kinds, *(line(row, f"{row.kind}: `{row.name}`") for row in rows[:max_rows])])


def plot(rows: Sequence[WorkRow], title: str, path: Path) -> None:
    """Draws a bar of time per step for each kind of work, with its floor as a part, into the file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = totals_by_kind(rows)[::-1]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = [row.kind for row in kinds]
    axes.barh(names, [row.seconds * 1e3 for row in kinds], color="tab:orange", label="above the floor")
    floors = [min(row.floor or 0.0, row.seconds) * 1e3 for row in kinds]
    axes.barh(names, floors, color="tab:blue", label="the floor")
    axes.set_xlabel("ms of a step")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(
        description=__doc__,
        epilog="Further options are those of train_throughput.py: --shape, --style, --compile, --documents, --set ...",
    )  # fmt: skip
    parser.add_argument("--only", default="native", help="whose step: bare, native, deepspeed, transformers (native)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the trace, for chrome://tracing or Perfetto")
    parser.add_argument("--fake", action="store_true", help="count on a GPU that is not there; no times, not compiled")
    parser.add_argument(
        "--rates", nargs=2, type=float, default=(800.0, 4.2), metavar=("TFLOP/s", "TB/s"),
        help="of that GPU: products and copies (800 4.2, an H200's)",
    )  # fmt: skip
    options, step_argv = parser.parse_known_args(argv)
    if options.fake and options.only != "native":
        parser.error("--fake works only with --only native")
    if options.fake:
        from megatron.planning.fake_cuda.shim import build, lacking, preload

        if (reason := lacking()) is not None:
            raise SystemExit(f"anatomy.py: {reason}")
        preload(build())
    from benchmarks.step_profile import SumError, count_fake_step, measured  # torch comes after the fake device

    try:
        report = count_fake_step(options, step_argv) if options.fake else measured(options, step_argv)
    except SumError as problem:
        sys.stderr.write(f"anatomy.py: {problem}\n")
        return 1
    rows = [WorkRow(**{key: row[key] for key in WorkRow.__dataclass_fields__}) for row in report["work"]]
    title = f"{report['device']}, {report['name']}, attention {report['attention']}"
    if options.fake:
        print(f"{title}: counted, not timed; each operation at its floor, {report['sum_seconds'] * 1e3:.1f} ms a step")
    else:
        unprofiled = f"{report['plain_seconds'] * 1e3:.1f} without a profiler"
        print(f"{title}: {report['step_seconds'] * 1e3:.1f} ms a step, {unprofiled}", report["gaps"], sep="\n\n")
    print(f"\n{table(rows)}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.png is not None:
        plot(rows, f"{report['name']} on {report['device']}", options.png)
    return 0


if __name__ == "__main__":
    run_command(main)
