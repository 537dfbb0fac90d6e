"""Judges promotion gates: bounds that a stage's metrics must meet before its weights are promoted.

Promoted weights are those at `checkpoints/<stage>_final`. A gates file has a list of requirements per stage:

    sft:
      baseline: pretrain
      require:
        - {metric: validation/lm_loss, max: 2.9}
        - {metric: train/lm_loss, max: 3.0, window: 10%}
        - {metric: eval_tasks/piqa_acc, min: 0.6, stderr_z: 1.0}
        - {metric: eval_tasks/piqa_acc, max_drop: 0.01}

`judge` depends only on the requirements and on the measurements of the stage and of its baseline stage.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import REQUIRED, new_key
from megatron.neox_arguments.reading.declared_file import read_declared
from megatron.neox_arguments.validation.types import check_keys
from megatron.pipelines.errors import GATE_FAILED, METRIC_MISSING
from megatron.pipelines.measurements import Measured, Measurements, MissingError

_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
Bound = Literal["min", "max", "max_drop", "max_rise"]
Result = Literal["pass", "fail", "missing"]
PASS: Final = "pass"
FAIL: Final = "fail"
MISSING: Final = "missing"


@dataclass(frozen=True)
class Requirement:
    """One entry of `require` in a gates file: a metric and its bounds, all of which must hold."""

    metric: str = new_key(REQUIRED, "Name of a metric in metrics.jsonl, or eval_tasks/TASK_METRIC for a task")
    min: float | None = new_key(None, "Smallest allowed value")
    max: float | None = new_key(None, "Largest allowed value")
    max_drop: float | str | None = new_key(
        None, "Largest allowed drop below the baseline's value: a number, or a share of that value such as 2%"
    )
    max_rise: float | str | None = new_key(
        None, "Largest allowed rise above the baseline's value: a number, or a share of that value such as 2%"
    )
    window: int | str | None = new_key(
        None, "Last steps whose values are combined: a number, or a share of the run such as 10%; unset: the last value"
    )
    aggregate: Literal["mean", "min", "max", "last"] = new_key("mean", "How the values in the window are combined")
    stderr_z: float | None = new_key(
        None, "Number of standard errors by which every bound must hold; the baseline's error is included", ge=0
    )


@dataclass(frozen=True)
class GateKeys:
    """The keys of one stage in a gates file."""

    require: tuple[Any, ...] = new_key(REQUIRED, "List of requirements, all of which must be met")
    baseline: str | None = new_key(None, "Earlier stage with whose metrics max_drop and max_rise compare")


@dataclass(frozen=True)
class Gate:
    """The gate of one stage: the requirements that its result must meet to be promoted.

    baseline: the stage with whose metrics max_drop and max_rise compare; None without such bounds.
    """

    stage: str
    requirements: tuple[Requirement, ...]
    baseline: str | None = None


@dataclass(frozen=True)
class Check:
    """The result of checking one bound of a requirement, such as `max: 2.9`.

    given: the bound as written in the gates file.
    value: the measured value. limit: the number that it was compared with, computed from `given` and the
        baseline's value.
    stderr: standard error of the comparison; None without stderr_z. window: rows from which `value` was
    computed.
    problem: why the value is missing or not finite; "" otherwise.
    """

    metric: str
    bound: Bound
    given: float | str
    result: Result
    value: float | None = None
    limit: float | None = None
    stderr: float | None = None
    stderr_z: float | None = None
    window: Mapping[str, Any] | None = None
    baseline_value: float | None = None
    baseline_stderr: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        """Returns the check as a line of text, such as `validation/lm_loss 3.21 <= 2.9: fail`."""
        if self.value is None or self.limit is None:
            return f"{self.metric} ({self.bound} {self.given}): {self.result}: {self.problem}"
        operator = ">=" if self.bound in ("min", "max_drop") else "<="
        baseline = f" (baseline {self.baseline_value:.6g})" if self.baseline_value is not None else ""
        sure = f" by {self.stderr_z:g} standard errors of {self.stderr:.3g}" if self.stderr is not None else ""
        problem = f": {self.problem}" if self.problem else ""
        return f"{self.metric} {self.value:.6g} {operator} {self.limit:.6g}{baseline}{sure}: {self.result}{problem}"


@dataclass(frozen=True)
class Judgement:
    """The result of judging a stage by its gate: the checks of all bounds.

    `result` is missing if a metric is missing, else fail if a check failed, else pass."""

    checks: tuple[Check, ...]

    @property
    def result(self) -> Result:
        results = {check.result for check in self.checks}
        return MISSING if MISSING in results else FAIL if FAIL in results else PASS

    @property
    def exit_code(self) -> int:
        """The exit code for this result: 0 if the gate passed, 3 if it failed, 4 if a metric is missing."""
        return {PASS: 0, FAIL: GATE_FAILED, MISSING: METRIC_MISSING}[self.result]


def read_gates(file: Path, stages: Sequence[str]) -> dict[str, Gate]:
    """Reads and checks a gates file, and returns the gates by the name of the stage.

    stages: names of the stages that may have a gate, in the order in which they run.

    Raises ConfigError with a line `FILE:LINE: key: problem` for each mistake.
    """
    origins: dict[str, str] = {}
    problems = ErrorCollector(origins)
    gates = {}
    for name, raw_gate in read_declared(file, origins, problems).items():
        if name not in stages:
            problems.add(
                str(name),
                f"is not a training stage of the pipeline; its training stages: {', '.join(stages) or 'none'}",
            )
        elif not isinstance(raw_gate, Mapping):
            problems.add(name, "expected a mapping with the key require (and baseline, for max_drop and max_rise)")
        else:
            gates[name] = _gate(name, raw_gate, problems)
    for name, gate in gates.items():
        earlier = stages[: list(stages).index(name)]
        if gate.baseline is not None and gate.baseline not in earlier:
            problems.add(
                f"{name}.baseline",
                f"{gate.baseline} is not an earlier training stage; earlier stages: {', '.join(earlier) or 'none'}",
            )
    problems.raise_if_any()
    return gates


def _gate(name: str, raw_gate: Mapping[str, Any], problems: ErrorCollector) -> Gate:
    values = check_keys(GateKeys, raw_gate, problems, f"{name}.")
    items = values["require"] or ()
    if values["require"] == ():
        problems.add(f"{name}.require", f"is empty; add a requirement, or remove {name} to have no gate")
    requirements = [
        _requirement(f"{name}.require.{i}", item, values["baseline"], problems) for i, item in enumerate(items)
    ]
    return Gate(name, tuple(requirement for requirement in requirements if requirement is not None), values["baseline"])


def _requirement(path: str, item: Any, baseline: str | None, problems: ErrorCollector) -> Requirement | None:
    if not isinstance(item, Mapping):
        problems.add(path, "expected a mapping, such as {metric: validation/lm_loss, max: 2.9}")
        return None
    num_problems = len(problems.lines)
    values = check_keys(Requirement, dict(item), problems, f"{path}.")
    if len(problems.lines) > num_problems:
        return None
    requirement = Requirement(**values)
    if not _bounds(requirement):
        problems.add(path, f"{requirement.metric}: has no bound; give min, max, max_drop or max_rise")
    for bound, value in _bounds(requirement):
        if isinstance(value, str) and _share(value) is None:
            problems.add(f"{path}.{bound}", f'expected a number, or a share such as 2%, got "{value}"')
        elif bound in ("max_drop", "max_rise") and not isinstance(value, str) and value < 0:
            problems.add(f"{path}.{bound}", f"expected at least 0, got {value}")
        if bound in ("max_drop", "max_rise") and baseline is None:
            problems.add(f"{path}.{bound}", "needs a baseline; beside require, set baseline to an earlier stage")
    if requirement.min is not None and requirement.max is not None and requirement.min > requirement.max:
        problems.add(
            f"{path}.min", f"{requirement.min} is more than max {requirement.max}, so no value can pass; correct one"
        )
    window = requirement.window
    if isinstance(window, str) and not 0 < (_share(window) or 0) <= 1:
        problems.add(f"{path}.window", f'expected a number of steps, or a share of the run such as 10%, got "{window}"')
    if isinstance(window, int) and window < 1:
        problems.add(f"{path}.window", f"expected at least 1 step, got {window}")
    if window is None and requirement.aggregate != "mean":
        problems.add(f"{path}.aggregate", "has no effect without window; set window, or remove aggregate")
    return requirement


def _bounds(requirement: Requirement) -> list[tuple[Bound, float | str]]:
    names: tuple[Bound, ...] = ("min", "max", "max_drop", "max_rise")
    return [(name, value) for name in names if (value := getattr(requirement, name)) is not None]


def judge(gate: Gate, measured: Measurements, baseline: Measurements | None) -> Judgement:
    """Checks all bounds of a gate, and returns the judgement.

    measured: measurements of the judged stage.
    baseline: measurements of the baseline stage's promoted weights; None if it has none.
    """
    return Judgement(tuple(
        _check(requirement, bound, threshold, measured, baseline)
        for requirement in gate.requirements for bound, threshold in _bounds(requirement)
    ))  # fmt: skip


def _check(
    requirement: Requirement, bound: Bound, threshold: float | str, measured: Measurements,
    baseline: Measurements | None,
) -> Check:  # fmt: skip
    z = requirement.stderr_z
    try:
        measurement = _measure(requirement, measured)
        reference: Measured | None = None
        if bound in ("max_drop", "max_rise"):
            if baseline is None:
                raise MissingError("the baseline stage has no promoted weights to compare with; run that stage first")
            try:
                reference = _measure(requirement, baseline)
            except MissingError as problem:
                raise MissingError(f"baseline: {problem}") from None
    except MissingError as problem:
        return Check(requirement.metric, bound, threshold, MISSING, problem=str(problem))
    limit, error = _limit(bound, threshold, reference), 0.0
    if z is not None:
        error = math.hypot(measurement.stderr or 0.0, (reference.stderr or 0.0) if reference is not None else 0.0)
    room = (z or 0.0) * error
    holds = measurement.value - room >= limit if bound in ("min", "max_drop") else measurement.value + room <= limit
    finite = all(map(math.isfinite, (measurement.value, limit, room)))
    return Check(
        requirement.metric, bound, threshold, PASS if holds and finite else FAIL, measurement.value, limit,
        error if z is not None else None, z, measurement.window,
        reference.value if reference is not None else None, reference.stderr if reference is not None else None,
        "" if finite else "not a finite number",
    )  # fmt: skip


def _measure(requirement: Requirement, measured: Measurements) -> Measured:
    share = _share(requirement.window)
    window: Any = requirement.window if share is None else share
    measurement = measured.measure(requirement.metric, window, requirement.aggregate)
    if requirement.stderr_z is not None and measurement.stderr is None:
        raise MissingError(
            f"stderr_z needs a standard error, but {requirement.metric} has none; set window, or remove stderr_z"
        )
    return measurement


def _share(value: float | str | None) -> float | None:
    """Returns a share as a number: 0.1 for `10%`. None for any other value."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else float(match[1]) / 100


def _limit(bound: str, threshold: float | str, reference: Measured | None) -> float:
    if reference is None:
        return float(threshold)
    share = _share(threshold)
    change = share * abs(reference.value) if share is not None else float(threshold)
    return reference.value - change if bound == "max_drop" else reference.value + change
