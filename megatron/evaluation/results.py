"""The results of an evaluation as files and as a table."""

import itertools
from pathlib import Path
from typing import Any

from megatron.data.files import sync, temporary
from megatron.evaluation.harness import EvaluationResults
from megatron.neox_arguments import NeoXArgs
from megatron.process.run_files import to_json

TIME = "%m-%d-%Y-%H-%M-%S"  # GPT-NeoX's


def table(evaluation: EvaluationResults) -> list[str]:
    """Returns the lines of a Markdown table of every task's and group's metrics."""
    results = evaluation.results
    rows = [("Task", "Version", "n-shot", "Filter", "Metric", "Value", "Stderr")]
    directions = results.get("higher_is_better", {})
    for task, values in results.get("results", {}).items():
        facts = (values.get("alias", task), results.get("versions", {}).get(task), results.get("n-shot", {}).get(task))
        leading_cells = [" " if fact is None else str(fact) for fact in facts]
        for name in sorted(name for name in values if "," in name and "_stderr," not in name):
            metric, _, kind = name.partition(",")
            better = {True: " \u2191", False: " \u2193"}.get(directions.get(task, {}).get(metric), "")
            error = values.get(f"{metric}_stderr,{kind}")
            error_text = f"\u00b1 {error:.4f}" if isinstance(error, float) else ""
            value = values[name]
            rows.append(
                (
                    *leading_cells,
                    kind,
                    metric + better,
                    f"{value:.6g}" if isinstance(value, float) else str(value),
                    error_text,
                )
            )
            leading_cells = [""] * 3
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]] if rows[1:] else []


def output_folder(args: NeoXArgs) -> Path:
    """Creates and returns the folder of results; called before the evaluation. Raises ConfigError if it
    cannot be written to."""
    folder = Path(args.eval_output_dir or ".").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = temporary(folder / "eval_results")
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise args.error("eval_output_dir", f"{folder}: cannot be written to ({problem.strerror})") from problem
    return folder


def write(args: NeoXArgs, evaluation: EvaluationResults, name: str) -> Path:
    """Writes `{prefix_}eval_results_NAME.json` to the output folder, and returns its path. name: NAME.

    With `eval_log_samples` it also writes `{prefix_}eval_samples_TASK_NAME.jsonl` for each task. It removes
    the samples from `evaluation`.
    """
    folder, prefix = output_folder(args), f"{args.eval_results_prefix}_" if args.eval_results_prefix else ""
    other_names = (f"{name}-{number}" for number in itertools.count(2))  # of the same second
    name = next(
        candidate
        for candidate in itertools.chain([name], other_names)
        if not (folder / f"{prefix}eval_results_{candidate}.json").exists()
    )
    samples: dict[str, list[Any]] = evaluation.results.pop("samples", {})
    for task, rows in samples.items():
        _replace(folder / f"{prefix}eval_samples_{task.replace('/', '_')}_{name}.jsonl", "".join(map(_line, rows)))
    path = folder / f"{prefix}eval_results_{name}.json"
    _replace(path, to_json(evaluation.results, indent=2, default=_jsonable, ensure_ascii=False) + "\n")
    return path


def _line(row: Any) -> str:
    return to_json(row, default=_jsonable, ensure_ascii=False) + "\n"


def _jsonable(value: Any) -> Any:
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)


def _replace(path: Path, text: str) -> None:
    unfinished = temporary(path)
    unfinished.write_text(text, encoding="utf-8")
    sync(unfinished)
    unfinished.replace(path)
