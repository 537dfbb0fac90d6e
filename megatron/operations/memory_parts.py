"""What a run wrote of the peak of its memory by part (`profile_memory`), as a table and as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.operations.run_folder import RunFolder, RunFolderError, open_run
from megatron.process.metrics_file import MEMORY_FILE
from megatron.process.run_files import Unfit, count, each, list_of, number, read_object, text, whole

_MOST_BARS = 16  # of ranks in a picture
_RANK = {"rank": count, "peak": count, "parts": each(number)}
_TIMELINE = {"rank": count, "moments": list_of(number), "parts": each(list_of(number))}
_KEYS = {"iteration", "device", "compile", "ranks", "timeline"}


def memory_file(path: str | Path) -> Path:
    """The `memory_parts.json` that a path names: itself, or that of a run by its `save` or its log folder.

    Raises RunFolderError where there is none, with what to do.
    """
    path = Path(path).expanduser()
    for file in (path, path / MEMORY_FILE):
        if file.is_file():
            return file
    run = open_run(path)
    file = run.logs / MEMORY_FILE
    if not file.is_file():
        raise RunFolderError(
            f"{file}: not there; set profile_memory: N, an iteration after {_iteration(run)}, the run's last so far, "
            "and let the run go on with it"
        )
    return file


def _iteration(run: RunFolder) -> int:
    return max([0, run.status().get("iteration") or 0, *(row["iteration"] for row in run.rows())])


def read_memory(file: Path) -> dict[str, Any]:
    """The content of a `memory_parts.json`. Raises RunFolderError where it is none."""
    try:
        found = read_object(file)
    except (OSError, ValueError) as problem:
        raise RunFolderError(f"{file}: {problem}") from problem
    try:
        if not found.keys() >= _KEYS or not found["ranks"]:
            raise Unfit(f"an object with {', '.join(sorted(_KEYS))}")
        found["ranks"] = list_of(whole(_RANK))(found["ranks"])
        found["timeline"] = whole(_TIMELINE)(found["timeline"])
        found |= whole({"iteration": count, "device": text})(found)
    except Unfit as expected:
        raise RunFolderError(f"{file}: is none of the files that profile_memory writes: not {expected}") from None
    return found


def table(found: Mapping[str, Any]) -> str:
    """A row for each part: of the rank with the highest peak, bytes and share of it; with several ranks also
    the lowest and highest of them all."""
    ranks = found["ranks"]
    fullest = max(ranks, key=lambda rank: rank["peak"])
    rows = [(part, size, [rank["parts"][part] for rank in ranks]) for part, size in fullest["parts"].items()]
    rows.append(("peak", fullest["peak"], [rank["peak"] for rank in ranks]))
    width = max(len(name) for name, *_ in rows)
    lines = [f"peak of iteration {found['iteration']}, rank {fullest['rank']} of {len(ranks)}, {found['device']}"]
    of_all = f"{'least':>14}{'most':>14}" if len(ranks) > 1 else ""
    lines.append(f"{'part':<{width}}{'memory':>14}{'share':>9}{of_all}")
    for name, size, sizes in rows:
        of_all = f"{_size(min(sizes)):>14}{_size(max(sizes)):>14}" if len(ranks) > 1 else ""
        lines.append(f"{name:<{width}}{_size(size):>14}{size / fullest['peak']:>9.1%}{of_all}")
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:,.2f} MiB"


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture: a stacked bar for each rank, and the parts over the step of the rank with the
    highest peak. Of many ranks those with the highest peaks are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fullest_first = sorted(found["ranks"], key=lambda rank: -rank["peak"])
    ranks = sorted(fullest_first[:_MOST_BARS], key=lambda rank: rank["rank"])
    parts = list(ranks[0]["parts"])
    colors = [f"C{number}" for number in range(len(parts))]
    largest = ranks[0]["peak"]
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    figure, (bars, course) = pyplot.subplots(
        1, 2, figsize=(12, 5), layout="constrained", width_ratios=(1, 2), sharey=True
    )
    names = [f"rank {rank['rank']}" for rank in ranks]
    below = [0.0] * len(ranks)
    for part, color in zip(parts, colors, strict=True):
        heights = [rank["parts"][part] / size for rank in ranks]
        bars.bar(names, heights, bottom=below, color=color, label=part)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    bars.tick_params(axis="x", rotation=90 if len(ranks) > 4 else 0)
    bars.set_ylabel(unit)
    bars.set_title(f"at the peak of iteration {found['iteration']}")
    timeline = found["timeline"]
    counted = [[value / size for value in values] for values in timeline["parts"].values()]
    course.stackplot(timeline["moments"], counted, colors=colors[: len(counted)])
    course.set_xlabel(f"allocations and frees of the step, rank {timeline['rank']}")
    course.set_title("over the step, as counted")
    handles, labels = bars.get_legend_handles_labels()
    course.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
