"""Reads result files of eval.py and lm-eval: scores of tasks, their standard errors, and those of each
document."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.process.run_files import Problems, open_file, parse

RESULT_FILES = "*eval_results_*.json"


class ScoreRow(NamedTuple):
    """A score of a task. filter: lm-eval's filter of answers. stderr: standard error; None: not computed."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None

    @property
    def name(self) -> str:
        """The name `TASK_METRIC`; for a filter other than lm-eval's default `none`, `TASK_METRIC_FILTER`."""
        return f"{self.task}_{self.metric}" + ("" if self.filter == "none" else f"_{self.filter}")


def score_rows(results: Mapping[str, Any]) -> Iterator[ScoreRow]:
    """Yields the scores in the content of a result file; values of other types are left out."""
    for task, values in results.get("results", {}).items():
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and not metric.endswith("_stderr") and _is_number(value):
                error = values.get(f"{metric}_stderr,{kind}")
                yield ScoreRow(task, metric, kind, float(value), float(error) if _is_number(error) else None)


def samples_file(results: Path, task: str) -> Path:
    """Returns the path of the file beside a result file that holds the samples of a task
    (`eval_log_samples`)."""
    prefix, mark, name = results.stem.rpartition("eval_results_")
    assert mark, results
    return results.with_name(f"{prefix}eval_samples_{task.replace('/', '_')}_{name}.jsonl")


def read_samples(path: Path, metric: str, kind: str, problems: Problems) -> dict[tuple[int, str], float]:
    """Returns the score of each document in a file of samples, by (`doc_id`, `doc_hash`).

    kind: the filter. Returns {} if the file is missing or unreadable, or if the metric has no single number
    for each document, as perplexities.
    """
    scores: dict[tuple[int, str], float] = {}
    try:
        with open_file(path) as file:
            for line in file:
                sample = parse(line)
                if sample.get("filter", "none") == kind:
                    if not _is_number(sample.get(metric)):
                        return {}
                    scores[sample["doc_id"], sample["doc_hash"]] = float(sample[metric])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        problems.note(path, "", f"holds no samples of lm-eval ({type(problem).__name__}: {problem})")
        return {}
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
