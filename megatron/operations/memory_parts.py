"""Shows a run's peak memory by part (`profile_memory`), as a table and as a plot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.run_folder import RunFolder, RunFolderError, open_run
from megatron.process.metrics_file import MEMORY_FILE
from megatron.process.run_files import Unfit, complete, count, list_of, map_of, number, read_object, text

_MOST_BARS = 16  # at most so many ranks have a bar in the picture
_RANK = {"rank": count, "peak": count, "parts": map_of(number)}
_TIMELINE = {"rank": count, "moments": list_of(number), "parts": map_of(list_of(number))}
_KEYS = {"iteration", "device", "compile", "ranks", "timeline"}


def memory_file(path: str | Path) -> Path:
    """Returns the path of the `memory_parts.json` that a run with `profile_memory` wrote.

    path: the file itself, or the run's `save` or log folder. Raises RunFolderError if there is no such
    file.
    """
    path = with_home(path)
    for file in (path, path / MEMORY_FILE):
        if file.is_file():
            return file
    run = open_run(path)
    file = run.logs / MEMORY_FILE
    if not file.is_file():
        raise RunFolderError(
            f"{file}: no such file; set profile_memory to an iteration after {_iteration(run)} (its last so far), "
            "and resume the run"
        )
    return file


def _iteration(run: RunFolder) -> int:
    return max([0, run.status().get("iteration") or 0, *(row["iteration"] for row in run.rows())])


def read_memory(file: Path) -> dict[str, Any]:
    """Returns the content of a `memory_parts.json`. Raises RunFolderError for any other file."""
    try:
        content = read_object(file)
    except (OSError, ValueError) as problem:
        raise RunFolderError(f"{file}: {problem}") from problem
    try:
        if not content.keys() >= _KEYS or not content["ranks"]:
            raise Unfit(f"an object with {', '.join(sorted(_KEYS))}")
        content["ranks"] = list_of(complete(_RANK))(content["ranks"])
        content["timeline"] = complete(_TIMELINE)(content["timeline"])
        content |= complete({"iteration": count, "device": text})(content)
    except Unfit as expected:
        raise RunFolderError(f"{file}: not a file that profile_memory wrote: expected {expected}") from None
    return content


def table(memory: Mapping[str, Any]) -> str:
    """Returns a text table of the memory that each part takes at the peak, on the rank with the highest peak.

    Columns: size and share of the peak; with several ranks also the least and most of all ranks.
    memory: from `read_memory`."""
    ranks = memory["ranks"]
    fullest = max(ranks, key=lambda rank: rank["peak"])
    rows = [(part, size, [rank["parts"][part] for rank in ranks]) for part, size in fullest["parts"].items()]
    rows.append(("peak", fullest["peak"], [rank["peak"] for rank in ranks]))
    width = max(len(name) for name, *_ in rows)
    lines = [f"peak of iteration {memory['iteration']}, rank {fullest['rank']} of {len(ranks)}, {memory['device']}"]
    extremes = f"{'least':>14}{'most':>14}" if len(ranks) > 1 else ""
    lines.append(f"{'part':<{width}}{'memory':>14}{'share':>9}{extremes}")
    for name, size, sizes in rows:
        extremes = f"{_size(min(sizes)):>14}{_size(max(sizes)):>14}" if len(ranks) > 1 else ""
        lines.append(f"{name:<{width}}{_size(size):>14}{size / fullest['peak']:>9.1%}{extremes}")
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:,.2f} MiB"


def plot(memory: Mapping[str, Any], path: Path) -> None:
    """Plots memory by part to the file `path`: a stacked bar per rank at the peak, and its course over one
    step.

    The course is that of the rank with the highest peak. At most 16 ranks have bars, those with the highest
    peaks. memory: from `read_memory`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fullest_first = sorted(memory["ranks"], key=lambda rank: -rank["peak"])
    ranks = sorted(fullest_first[:_MOST_BARS], key=lambda rank: rank["rank"])
    parts = list(ranks[0]["parts"])
    colors = [f"C{number}" for number in range(len(parts))]
    largest = ranks[0]["peak"]
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    figure, (bar_axes, step_axes) = pyplot.subplots(
        1, 2, figsize=(12, 5), layout="constrained", width_ratios=(1, 2), sharey=True
    )
    names = [f"rank {rank['rank']}" for rank in ranks]
    bottoms = [0.0] * len(ranks)
    for part, color in zip(parts, colors, strict=True):
        heights = [rank["parts"][part] / size for rank in ranks]
        bar_axes.bar(names, heights, bottom=bottoms, color=color, label=part)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    bar_axes.tick_params(axis="x", rotation=90 if len(ranks) > 4 else 0)
    bar_axes.set_ylabel(unit)
    bar_axes.set_title(f"at the peak of iteration {memory['iteration']}")
    timeline = memory["timeline"]
    layers = [[value / size for value in values] for values in timeline["parts"].values()]
    step_axes.stackplot(timeline["moments"], layers, colors=colors[: len(layers)])
    step_axes.set_xlabel(f"allocations and frees of the step, rank {timeline['rank']}")
    step_axes.set_title("over the step, as counted")
    handles, labels = bar_axes.get_legend_handles_labels()
    step_axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
