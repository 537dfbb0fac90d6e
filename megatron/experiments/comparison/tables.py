"""Shows a comparison as sections of tables, for text and page alike, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from os.path import commonprefix
from typing import Any

from megatron.experiments.comparison.comparison import Comparison
from megatron.experiments.comparison.curves import AlignedCurve, Axis
from megatron.experiments.comparison.scores import Score
from megatron.operations.report.run_data import Run
from megatron.process.text_tables import Section, Table, table_lines

_AXES: dict[Axis, str] = {"step": "step", "tokens": "tokens", "flops": "FLOPs"}
_LONGEST = 60  # characters of a key's value in a table
_SIGNIFICANT = 0.05


def lines(comparison: Comparison) -> Iterator[str]:
    """Yields the lines of a comparison for people."""
    for number, section in enumerate(sections(comparison)):
        yield from ([""] if number else [])
        yield section.title
        for item in section.items:
            yield from table_lines(item) if isinstance(item, Table) else [item]


def sections(comparison: Comparison) -> Iterator[Section]:
    """Yields the parts of a comparison."""
    yield Section("Runs", [_runs_table(comparison), *(f"note: {note}" for note in comparison.notes)])
    yield Section("Differing keys", list(_key_items(comparison)))
    for curve in comparison.curves:
        yield Section(f"{curve.metric} by {_AXES[comparison.axis]}", list(_curve_items(comparison, curve)))
    yield Section("Speed", [_speed_table(comparison)])
    if any(comparison.scores):
        yield Section("Scores", list(_score_items(comparison)))


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison for `--json`; differences are from the first run."""
    difference = comparison.differences
    return {
        "runs": [
            {"name": run.name, "save": _text(run.folder.save), "logs": str(run.folder.logs),
             "status": run.status.get("status"), "step": _last_step(run)}
            for run in comparison.runs
        ],
        "by": comparison.axis, "notes": list(comparison.notes), "problems": list(comparison.problems),
        "differing_keys": None if difference is None else asdict(difference),
        "curves": [asdict(curve) for curve in comparison.curves],
        "speed": [asdict(speed) for speed in comparison.speeds],
        "scores": [
            {name: {**asdict(score), "file": _text(score.file)} for name, score in scores.items()}
            for scores in comparison.scores
        ],
        "score_differences": [asdict(item) for item in comparison.score_differences],
    }  # fmt: skip


def _runs_table(comparison: Comparison) -> Table:
    rows = [
        (run.name, str(run.status.get("status") or run.summary.get("status") or "unknown"), f"{_last_step(run):,}",
         _number(speed.tokens))
        for run, speed in zip(comparison.runs, comparison.speeds, strict=True)
    ]  # fmt: skip
    return Table(("run", "status", "steps", "tokens"), rows)


def _key_items(comparison: Comparison) -> Iterator[str | Table]:
    difference = comparison.differences
    if difference is None:
        yield "not compared: the configuration of a run is missing"
        return
    if difference.values:
        rows = [(key, *_short(values)) for key, values in difference.values.items()]
        yield Table(("key", *_names(comparison)), rows)
    else:
        yield "no key that changes the training differs"
    if difference.derived:
        yield f"also differing, because they follow from others: {', '.join(difference.derived)} (--all shows them)"
    if difference.places:
        places = dict.fromkeys(key.partition(".")[0] for key in difference.places)
        yield f"not counted: {', '.join(places)} (--all counts folders, logging and launching too)"


def _curve_items(comparison: Comparison, curve: AlignedCurve) -> Iterator[str | Table]:
    names, reference_name = _names(comparison), comparison.runs[0].name
    heads = [_AXES[comparison.axis], *names, *(f"{name} - {reference_name}" for name in names[1:])]
    rows = []
    for point, values in zip(curve.points, curve.values, strict=True):
        cells = [("~" if value.interpolated else "") + f"{value.value:z.4f}" if value else "-" for value in values]
        reference = values[0]
        changes = [f"{value.value - reference.value:+z.4f}" if value and reference else "-" for value in values[1:]]
        rows.append((_number(point), *cells, *changes))
    ends = [f"{end[1]:z.4f}" if end else "-" for end in curve.ends]
    changes = [f"{end[1] - curve.ends[0][1]:+z.4f}" if end and curve.ends[0] else "-" for end in curve.ends[1:]]
    rows.append(("end", *ends, *changes))
    yield Table(heads, rows)
    reached = [_number(end[0]) if end else "nothing" for end in curve.ends]
    if len(set(reached)) > 1:
        yield "the ends are at " + ", ".join(f"{place} ({name})" for place, name in zip(reached, names, strict=True))
    if any(value is not None and value.interpolated for values in curve.values for value in values):
        yield "~: on the straight line between two logged points; no value stands outside of what a run has logged"
    for name, count in zip(names, curve.not_finite, strict=True):
        if count:
            yield f"{name}: {count:,} NaN or infinite values are left out"
    if curve is comparison.curves[-1]:
        yield "differences of curves have no test, because one run does not tell how much another seed changes"


def _speed_table(comparison: Comparison) -> Table:
    speeds = comparison.speeds
    rows = [
        ("tokens/s, median", *(_number(speed.tokens_per_second) for speed in speeds)),
        ("tokens/s and rank", *(
            _number(speed.tokens_per_second / speed.gpus if speed.tokens_per_second and speed.gpus else None)
            for speed in speeds
        )),
        ("MFU, median", *(f"{speed.utilization:.1%}" if speed.utilization is not None else "-" for speed in speeds)),
        ("ranks", *(_number(speed.gpus) for speed in speeds)),
        ("hours in steps", *(f"{speed.hours:.2f}" if speed.hours is not None else "-" for speed in speeds)),
    ]  # fmt: skip
    if comparison.axis == "flops":
        rows.append(("model FLOPs", *(_number(speed.flops) for speed in speeds)))
    return Table(("", *_names(comparison)), rows)


def _score_items(comparison: Comparison) -> Iterator[str | Table]:
    names, tested = _names(comparison), {(item.name, item.run): item for item in comparison.score_differences}
    rows = []
    for name in dict.fromkeys(name for scores in comparison.scores for name in scores):
        for run, scores in enumerate(comparison.scores):
            if name not in scores:
                continue
            score, item = scores[name], tested.get((name, run))
            cells = ["", "", "", ""]
            if item is not None:
                error = f" ± {_value(item.stderr)}" if item.stderr is not None else ""
                mark = "*" if item.corrected_p is not None and item.corrected_p < _SIGNIFICANT else ""
                cells = [f"{item.difference:+z.4g}{error}", _p(item.p), _p(item.corrected_p) + mark, item.test]
            rows.append((_title(name, score), names[run], _step(score), _with_error(score), *cells))
    heads = ("score", "run", "step", "value ± stderr", f"minus {names[0]}", "p", "p (Holm)", "test")
    yield Table(heads, rows, ends_in_text=True)
    count = sum(item.p is not None for item in comparison.score_differences)
    if count:
        yield (
            f"two-sided tests of the difference from {names[0]}. McNemar (exact) and paired t: on the same documents, "
            "whose samples both runs logged. z: from both standard errors, as if the documents were others, which is "
            "less sensitive"
        )
        yield f"p (Holm): corrected for the {count} tests of this table; *: below {_SIGNIFICANT}"
    yield "the standard errors are of the documents, not of training: another seed may change more"


def _title(name: str, score: Score) -> str:
    return name + ("" if score.higher_is_better else " (lower is better)")


def _with_error(score: Score) -> str:
    return _value(score.value) + (f" ± {_value(score.stderr)}" if score.stderr is not None else "")


def _value(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def _p(p: float | None) -> str:
    return "" if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def _step(score: Score) -> str:
    return f"{score.iteration:,}" if score.iteration is not None else "-"


def _names(comparison: Comparison) -> list[str]:
    return [run.name for run in comparison.runs]


def _last_step(run: Run) -> int:
    return max((int(points.iterations[-1]) for points in run.series.values()), default=0)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"


def _short(values: Sequence[str]) -> list[str]:
    """Returns texts of at most _LONGEST characters. Of longer texts, it shows the part around the first
    difference."""
    start = max(0, len(commonprefix(list(values))) - _LONGEST // 3)
    texts = []
    for value in values:
        shown_part = value if len(value) <= _LONGEST or not start else f"... {value[start:]}"
        texts.append(shown_part if len(shown_part) <= _LONGEST else f"{shown_part[: _LONGEST - 4]} ...")
    return texts


def _text(value: object) -> str | None:
    return None if value is None else str(value)
