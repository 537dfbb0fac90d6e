"""Writes the results of `make gpu` (benchmarks/results/*.json) into docs/benchmarks.md, and draws their
plots.

With --check it writes nothing, and exits with 1 if the page or a plot is out of date."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_run.results import read, speed_ratio  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

BEGIN = "<!-- gpu results: made by tools/docs/gpu_results.py; do not edit -->\n"
END = "<!-- end of gpu results -->\n"
NO_RESULTS = (
    "No results yet: `make gpu` has not run on a GPU since it was made, and neither has this program in its present\n"
    "form. Numbers of a rehearsal say nothing of GPUs and are not kept.\n"
)
Part = Mapping[str, Any]


def section(folder: Path) -> str:
    """Returns Markdown with all results in a folder, the newest first.

    Raises ValueError for a file of a rehearsal (a run without a GPU) or of another format."""
    texts = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        run = read(path)
        if run["kind"] not in ("gpu", "ablation"):
            raise ValueError(f"{path}: these are results of a {run['kind']}, not of a GPU; delete the file")
        texts.append(_run_section(run, path))
    return "\n".join(texts) or NO_RESULTS


def _run_section(run: Mapping[str, Any], path: Path) -> str:
    parts: Sequence[Part] = run["parts"]
    facts = next((part["result"] for part in parts if part["result"] and "product_flops" in part["result"]), None)
    title = "the 1.4B shape's step with one setting changed at a time" if run["kind"] == "ablation" else ""
    lines = [f"### {', '.join(filter(None, (run['device'], run['date'], title)))}", ""]
    if facts is not None:
        lines += [_facts(facts, run), ""]
    speeds = [part for part in parts if _speed(part)]
    if speeds:
        part_by_name = {part["name"]: part for part in parts}
        head = (
            "| a training step | tokens/s per GPU | hours for 10^9 tokens | ms | model TFLOP/s | NeoX's TFLOP/s "
            "| of ceiling | speed beside | peak GB |"
        )
        lines += [
            head,
            "|---|---:|---:|---:|---:|---:|---:|---|---:|",
            *(_speed_row(part, part_by_name) for part in speeds),
            "",
        ]
        lines += [f"![TFLOP/s of each]({_link(path.with_suffix('.png'))})", ""]
    lines += [line for part in parts for line in _own_table(part)]
    tests = [part for part in parts if part["tests"]]
    if tests:
        lines += ["| correctness | | tests | s |", "|---|---|---|---:|", *map(_tests_row, tests), ""]
    lines += [_missing(part) for part in parts if part["state"] != "passed"]
    return "\n".join(lines).rstrip() + "\n"


def _link(path: Path) -> str:
    return f"../{path.relative_to(ROOT)}" if path.is_relative_to(ROOT) else path.name


def _facts(facts: Part, run: Mapping[str, Any]) -> str:
    rates = [f"{name} {flops / 1e12:.0f} TFLOP/s" for name, flops in facts["product_flops"].items()]
    packages = [f"{name} {facts['packages'][name] or 'not there'}" for name in ("deepspeed", "transformers", "trl")]
    return (
        f"torch {facts['torch']}, Python {facts['python']}, driver {facts['driver']}, NCCL {facts['nccl']}, "
        f"{', '.join(packages)}; commit {run['commit'] or 'unknown'}. Products of 8192 x 8192: {', '.join(rates)}; "
        f"copies {facts['copy_bytes_per_second'] / 1e12:.2f} TB/s."
    )


def _tests_row(part: Part) -> str:
    counts = Counter(row["outcome"] for row in part["tests"])
    words = ", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped") if counts[state])
    return f"| {part['about']} | {part['state']} | {words} | {part['seconds']:.0f} |"


def _speed(part: Part) -> Part | None:
    rows = (part["result"] or {}).get("rows", [])
    return rows[0] if rows and "model_flops" in rows[0] else None


def _speed_row(part: Part, part_by_name: Mapping[str, Part]) -> str:
    row, compared_part = _speed(part), part_by_name.get(part["beside"] or "")
    assert row is not None
    speed = speed_ratio(part, compared_part)
    ratio = "" if speed is None else f"{speed:.3f} of: {part['beside']}"
    return (
        f"| {part['name']} | {row['tokens']:,.0f} | {1e9 / row['tokens'] / 3600:.2f} | {row['seconds'] * 1e3:.1f} | "
        f"{row['model_flops'] / 1e12:.1f} | {row['neox_flops'] / 1e12:.1f} | {row['of_ceiling']:.1%} | {ratio} | "
        f"{row['peak_bytes'] / 1e9:.1f} |"
    )


# Results with a table of their own: a key that only their rows have -> (head of the table, format of a row).
_TABLES: dict[str, tuple[tuple[str, str], str]] = {
    "mixer": (
        ("| a mixer | | ms | speed beside ours |", "|---|---|---:|---:|"),
        "| {mixer} | {name} | {milliseconds:.1f} | {beside_ours:.2f} |",
    ),
    "generation": (
        ("| generation | | tokens/s | beside the first | same tokens |", "|---|---|---:|---:|---:|"),
        "| {generation} | {name} | {tokens_per_second:,.0f} | {beside_ours:.2f} | {same:.0%} |",
    ),
    "experts": (
        ("| a block of experts | | ms | speed beside ours |", "|---|---|---:|---:|"),
        "| {experts} | {name} | {milliseconds:.1f} | {beside_ours:.2f} |",
    ),
    "above_floor_ms": (
        ("| where a step's time goes | ms | its floor | above it |", "|---|---:|---:|---:|"),
        "| {kind} | {milliseconds:.1f} | {floor_ms:.1f} | {above_floor_ms:.1f} |",
    ),
    "over_floor": (
        ("| output layer and loss | ms | of their products alone | peak GB |", "|---|---:|---:|---:|"),
        "| {name} | {milliseconds:.1f} | {over_floor:.2f} | {peak_gb:.2f} |",
    ),
    "pairs_per_second": (
        ("| DPO | pairs/s | with reference | ours is faster | peak GB |", "|---|---:|---:|---:|---:|"),
        "| {name} | {pairs_per_second:.2f} | {pairs_per_second_with_reference:.2f} | {ratio:.2f} | {peak_gb:.1f} |",
    ),
}


def _own_table(part: Part) -> list[str]:
    rows = (part["result"] or {}).get("rows", [])
    for key, (head, line) in _TABLES.items():
        if rows and key in rows[0]:
            return [*head, *(line.format(**_in_units(row)) for row in rows), ""]
    return []


def _in_units(row: Part) -> dict[str, Any]:
    """Returns a row of results with its time also in milliseconds, and its peak memory also in GB."""
    converted = dict(row)
    if "seconds" in row:
        converted["milliseconds"] = row["seconds"] * 1e3
    if (peak := row.get("peak_bytes", row.get("peak"))) is not None:
        converted["peak_gb"] = peak / 1e9
    return converted


def _missing(part: Part) -> str:
    failed = [f"`{row['name']}`" for row in part["tests"] if row["outcome"] == "failed"]
    return f"- {part['name']}: {part['state']}, {part['reason']}{': ' if failed else ''}{', '.join(failed)}"


def plot(run: Mapping[str, Any], path: Path) -> None:
    """Draws bars of each training step's FLOP/s, and of the ceiling measured in the same run, to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [(part["name"], part["result"], row) for part in run["parts"] if (row := _speed(part)) is not None]
    names = [name for name, _, _ in steps][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.4 * len(steps)), layout="constrained")
    ceilings = [result["ceiling_flops"] / 1e12 for _, result, _ in steps][::-1]
    axes.barh(names, ceilings, color="lightgrey", label="matrix products alone")
    axes.barh(names, [row["model_flops"] / 1e12 for _, _, row in steps][::-1], color="tab:blue", label="training step")
    axes.set_xlabel(f"model TFLOP/s, {run['device']}, {run['date']}")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if page or plots are out of date"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", metavar="FILE")
    options = parser.parse_args(argv)
    text = options.page.read_text(encoding="utf-8")
    head, tail = text.split(BEGIN)
    try:
        updated = head + BEGIN + section(options.results) + END + tail.split(END)[1]
    except (ValueError, KeyError) as problem:
        sys.stderr.write(f"gpu_results.py: {problem}\n")
        return 1
    plots = {path: path.with_suffix(".png") for path in sorted(options.results.glob("*.json"))}
    measured = {path: png for path, png in plots.items() if any(map(_speed, read(path)["parts"]))}
    if options.check:
        stale = [str(options.page)] if updated != text else []
        stale += [str(png) for png in measured.values() if not png.exists()]
        if stale:
            sys.stderr.write(f"{', '.join(stale)}: out of date; run python tools/docs/gpu_results.py\n")
        return 1 if stale else 0
    options.page.write_text(updated, encoding="utf-8")
    for path, png in measured.items():
        plot(read(path), png)
    return 0


if __name__ == "__main__":
    run_command(main)
