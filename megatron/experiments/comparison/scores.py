"""Finds the scores of runs with their standard errors, and tests whether two runs differ.

Scores come from result files of eval.py and of evaluations during training, else from metrics.jsonl.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron.experiments.comparison.significance import holm, mcnemar_test, paired_t_test, z_test
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.report.run_data import Run
from megatron.process.run_files import Problems, Unfit, count, number, read_object
from megatron.process.score_files import RESULT_FILES, read_samples, samples_file, score_rows

_Samples = Mapping[tuple[int, str], float]
_PREFIX = "eval_tasks/"
_ROUNDING = 1e-6  # most difference between a score and the mean of its documents


@dataclass(frozen=True)
class Score:
    """A score of a run. kind: lm-eval's filter of answers.

    iteration: step of the evaluated weights; None: unknown.
    stderr: standard error; None: unknown.
    task_hash: hash of documents, prompts and targets; None: unknown.
    higher_is_better: also if unknown.
    file: the result file; None: the score is from metrics.jsonl.
    """

    value: float
    iteration: int | None
    stderr: float | None = None
    task: str = ""
    metric: str = ""
    kind: str = ""
    task_hash: str | None = None
    version: str | None = None
    higher_is_better: bool = True
    file: Path | None = None


@dataclass(frozen=True)
class ScoreDifference:
    """A score of a run minus that of the first run, and a test of the difference.

    run: index of the run.
    stderr: standard error of the difference.
    test: name of the test, or the reason why there is none.
    p, corrected_p: p-values, the second with Holm's correction over all tests of the comparison; None without
        a test.
    """

    name: str
    run: int
    difference: float
    stderr: float | None
    test: str
    p: float | None
    corrected_p: float | None = None


def read_scores(run: Run, folders: Sequence[str | Path]) -> dict[str, Score]:
    """Returns the newest scores of a run, by `<task>_<metric>`. Those of result files win, because they have
    standard errors.

    folders: further folders with result files. A file counts if it is in the run's own folders, or names
    the run's `save`, or a folder in it, as the evaluated model.
    """
    scores: dict[str, Score] = {}
    for name, series in run.series.items():
        if name.startswith(_PREFIX) and not name.endswith("_stderr"):
            scores[name.removeprefix(_PREFIX)] = Score(float(series.values[-1]), int(series.iterations[-1]))
    for _, _, evaluated_scores in sorted(_evaluations(run, folders), key=lambda evaluation: evaluation[:2]):
        scores.update(evaluated_scores)
    return scores


def differences(scores: Sequence[Mapping[str, Score]], problems: Problems) -> list[ScoreDifference]:
    """Returns the difference of each score from the first run's, for all runs that have both.

    scores: of each run. problems: gets a message for each unreadable file of samples.
    """
    samples = cache(partial(_samples, problems=problems))
    tested = [
        _difference(name, run, reference, run_scores[name], samples)
        for name, reference in scores[0].items() for run, run_scores in enumerate(scores[1:], 1) if name in run_scores
    ]  # fmt: skip
    corrected = iter(holm([item.p for item in tested if item.p is not None]))
    return [item if item.p is None else replace(item, corrected_p=next(corrected)) for item in tested]


def _difference(
    name: str, run: int, reference: Score, compared: Score, samples: Callable[[Score], _Samples]
) -> ScoreDifference:
    difference = compared.value - reference.value

    def result(test: str, p: float | None = None, stderr: float | None = None) -> ScoreDifference:
        if None not in (reference.iteration, compared.iteration) and reference.iteration != compared.iteration:
            test = f"{test} (of steps {reference.iteration} and {compared.iteration})"
        return ScoreDifference(name, run, difference, stderr, test, p)

    if not math.isfinite(difference):
        return result("none: a score is not finite")
    if reference.task_hash != compared.task_hash and reference.task_hash is not None and compared.task_hash is not None:
        return result("none: other documents or prompts")
    if reference.version != compared.version and reference.file is not None and compared.file is not None:
        return result(f"none: task version {reference.version} and {compared.version}")
    if reference.task_hash is not None and reference.task_hash == compared.task_hash:
        reference_samples, compared_samples = samples(reference), samples(compared)
        if reference_samples and reference_samples.keys() == compared_samples.keys():
            return result(*_paired_test([(reference_samples[key], compared_samples[key]) for key in reference_samples]))
    if reference.stderr is None or compared.stderr is None:
        return result("none: no standard error")
    stderr = math.hypot(reference.stderr, compared.stderr)
    if stderr == 0.0:
        return result("none: standard errors of 0", stderr=0.0)
    return result("z", z_test(difference, stderr), stderr)


def _paired_test(pairs: Sequence[tuple[float, float]]) -> tuple[str, float | None, float | None]:
    """Returns (name of the test, p-value, standard error of the difference) for the scores of the same
    documents."""
    changes = [compared - reference for reference, compared in pairs]
    stderr = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else None
    if {value for pair in pairs for value in pair} <= {0.0, 1.0}:
        return "McNemar", mcnemar_test(changes.count(-1.0), changes.count(1.0)), stderr
    p = paired_t_test(changes)
    return ("none: all documents changed alike" if p is None else "paired t"), p, stderr


def _samples(score: Score, problems: Problems) -> _Samples:
    """Returns the score of each document; {} if it was not logged, or the score is no mean of them."""
    if score.file is None:
        return {}
    samples = read_samples(samples_file(score.file, score.task), score.metric, score.kind, problems)
    is_mean = samples and abs(statistics.fmean(samples.values()) - score.value) < _ROUNDING
    return samples if is_mean else {}


def _evaluations(run: Run, folders: Sequence[str | Path]) -> Iterator[tuple[float, float, dict[str, Score]]]:
    """Yields (iteration or infinity if unknown, date, scores) of each result file on this run's model."""
    own_folders = [folder.resolve() for folder in (run.folder.save, run.folder.logs) if folder is not None]
    configured = [run.args.eval_output_dir] if run.args is not None and run.args.eval_output_dir else []
    places = [*own_folders, *(with_home(folder).resolve() for folder in (*configured, *folders, "."))]
    for path in (path for place in dict.fromkeys(places) for path in sorted(place.glob(RESULT_FILES))):
        try:
            results = read_object(path)
            model = results.get("config", {}).get("model_args") or {}
            iteration = count(model["iteration"]) if model.get("iteration") is not None else None
            date, scores = float(number(results.get("date", 0.0))), _scores_of(path, results, iteration)
        except (OSError, ValueError, TypeError, AttributeError, Unfit) as problem:
            run.folder.problems.note(path, "", f"holds no results of lm-eval ({type(problem).__name__}: {problem})")
            continue
        source = with_home(str(model.get("load"))).resolve()
        if path.parent in own_folders or (run.folder.save is not None and source.is_relative_to(own_folders[0])):
            yield (math.inf if iteration is None else iteration), date, scores


def _scores_of(path: Path, results: Mapping[str, Any], iteration: int | None) -> dict[str, Score]:
    hashes, versions, better = (results.get(part, {}) for part in ("task_hashes", "versions", "higher_is_better"))

    def text_of(part: Mapping[str, Any], task: str) -> str | None:
        return str(part[task]) if part.get(task) is not None else None

    return {
        row.name: Score(
            row.value, iteration, row.stderr, row.task, row.metric, row.filter, text_of(hashes, row.task),
            text_of(versions, row.task), better.get(row.task, {}).get(row.metric) is not False, path,
        )
        for row in score_rows(results)
    }  # fmt: skip
