"""Promotion gates: what a stage's metrics must be before its weights move to `checkpoints/<stage>_final`.

A file of gates holds a list of requirements for each stage:

    sft:
      baseline: pretrain
      require:
        - {metric: validation/lm_loss, max: 2.9}
        - {metric: train/lm_loss, max: 3.0, window: 10%}
        - {metric: eval_tasks/piqa_acc, min: 0.6, stderr_z: 1.0}
        - {metric: eval_tasks/piqa_acc, max_drop: 0.01}

Judging is a pure function of the requirements, the stage's measurements and those of its baseline.
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
    """One entry of `require`: a metric and its bounds. It passes if all of its bounds hold."""

    metric: str = new_key(REQUIRED, "Name of a metric in metrics.jsonl, or eval_tasks/TASK_METRIC for a task")
    min: float | None = new_key(None, "Smallest allowed value")
    max: float | None = new_key(None, "Largest allowed value")
    max_drop: float | str | None = new_key(
        None, "Largest drop below the baseline's value: a number, or a share of the value as 2%"
    )
    max_rise: float | str | None = new_key(None, "Largest rise above the baseline's value, likewise")
    window: int | str | None = new_key(
        None, "Number of last steps, or a share of the run as 10%; unset: the last value alone"
    )
    aggregate: Literal["mean", "min", "max", "last"] = new_key("mean", "How the values of a window are combined")
    stderr_z: float | None = new_key(
        None, "Number of standard errors by which every bound must hold, with the baseline's error included", ge=0
    )


@dataclass(frozen=True)
class GateKeys:
    """The keys of one stage in a gates file."""

    require: tuple[Any, ...] = new_key(REQUIRED, "The requirements")
    baseline: str | None = new_key(None, "Stage for comparison by max_drop and max_rise")


@dataclass(frozen=True)
class Gate:
    """The gate of one stage: what its result must fulfil to be promoted.

    baseline: the stage that max_drop and max_rise compare with; None without such bounds.
    """

    stage: str
    requirements: tuple[Requirement, ...]
    baseline: str | None = None


@dataclass(frozen=True)
class Check:
    """The result for one bound of a requirement, for example min.

    limit: the number that `value` was compared with, computed from `given` and the baseline's value.
    given: the bound as written in the file.
    problem: why the value is missing or not a number; "" otherwise.
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
        """Returns a line such as `validation/lm_loss 3.21 <= 2.9: fail`."""
        if self.value is None or self.limit is None:
            return f"{self.metric} ({self.bound} {self.given}): {self.result}: {self.problem}"
        operator = ">=" if self.bound in ("min", "max_drop") else "<="
        baseline = f" (baseline {self.baseline_value:.6g})" if self.baseline_value is not None else ""
        sure = f" by {self.stderr_z:g} standard errors of {self.stderr:.3g}" if self.stderr is not None else ""
        problem = f": {self.problem}" if self.problem else ""
        return f"{self.metric} {self.value:.6g} {operator} {self.limit:.6g}{baseline}{sure}: {self.result}{problem}"


@dataclass(frozen=True)
class Judgement:
    """The checks of all bounds of a gate. Its exit code is 4 if a metric is missing, else 3 if a check
    failed, else 0."""

    checks: tuple[Check, ...]

    @property
    def result(self) -> Result:
        results = {check.result for check in self.checks}
        return MISSING if MISSING in results else FAIL if FAIL in results else PASS

    @property
    def exit_code(self) -> int:
        """Returns 0 if the gate passed, 3 if it failed, 4 if a metric is missing."""
        return {PASS: 0, FAIL: GATE_FAILED, MISSING: METRIC_MISSING}[self.result]


def read_gates(file: Path, stages: Sequence[str]) -> dict[str, Gate]:
    """Returns the gates in a gates file by stage.

    stages: names of the stages that may have a gate, in running order.

    Raises ConfigError with a line for each mistake: `FILE:LINE: key: problem`.
    """
    origins: dict[str, str] = {}
    problems = ErrorCollector(origins)
    gates = {}
    for name, raw_gate in read_declared(file, origins, problems).items():
        if name not in stages:
            problems.add(str(name), f"is not a training stage of the pipeline; there are {', '.join(stages) or 'none'}")
        elif not isinstance(raw_gate, Mapping):
            problems.add(name, "expected a mapping with require, and baseline for max_drop and max_rise")
        else:
            gates[name] = _gate(name, raw_gate, problems)
    for name, gate in gates.items():
        earlier = stages[: list(stages).index(name)]
        if gate.baseline is not None and gate.baseline not in earlier:
            problems.add(
                f"{name}.baseline", f"{gate.baseline} is not an earlier stage; there are {', '.join(earlier) or 'none'}"
            )
    problems.raise_if_any()
    return gates


def _gate(name: str, raw_gate: Mapping[str, Any], problems: ErrorCollector) -> Gate:
    values = check_keys(GateKeys, raw_gate, problems, f"{name}.")
    items = values["require"] or ()
    if values["require"] == ():
        problems.add(f"{name}.require", f"is empty; to have no gate, remove {name}")
    requirements = [
        _requirement(f"{name}.require.{i}", item, values["baseline"], problems) for i, item in enumerate(items)
    ]
    return Gate(name, tuple(requirement for requirement in requirements if requirement is not None), values["baseline"])


def _requirement(path: str, item: Any, baseline: str | None, problems: ErrorCollector) -> Requirement | None:
    if not isinstance(item, Mapping):
        problems.add(path, "expected a mapping, as {metric: validation/lm_loss, max: 2.9}")
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
            problems.add(f"{path}.{bound}", f'expected a number, or a share as 2%, got "{value}"')
        elif bound in ("max_drop", "max_rise") and not isinstance(value, str) and value < 0:
            problems.add(f"{path}.{bound}", f"expected at least 0, got {value}")
        if bound in ("max_drop", "max_rise") and baseline is None:
            problems.add(f"{path}.{bound}", "needs a baseline; set baseline to a stage, beside require")
    if requirement.min is not None and requirement.max is not None and requirement.min > requirement.max:
        problems.add(f"{path}.min", f"{requirement.min} is more than max {requirement.max}: nothing can pass")
    window = requirement.window
    if isinstance(window, str) and not 0 < (_share(window) or 0) <= 1:
        problems.add(f"{path}.window", f'expected a number of steps, or a share of the run as 10%, got "{window}"')
    if isinstance(window, int) and window < 1:
        problems.add(f"{path}.window", f"expected at least 1 step, got {window}")
    if window is None and requirement.aggregate != "mean":
        problems.add(f"{path}.aggregate", "has no effect without window; set window, or remove it")
    return requirement


def _bounds(requirement: Requirement) -> list[tuple[Bound, float | str]]:
    names: tuple[Bound, ...] = ("min", "max", "max_drop", "max_rise")
    return [(name, value) for name in names if (value := getattr(requirement, name)) is not None]


def judge(gate: Gate, measured: Measurements, baseline: Measurements | None) -> Judgement:
    """Returns the checks of all bounds of a gate.

    measured: measurements of the judged stage.
    baseline: measurements of the baseline's promoted weights; None if there are none.
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
                raise MissingError("the baseline stage has no promoted weights to compare with")
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
    """Converts `10%` to 0.1. Returns None for another value."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else float(match[1]) / 100


def _limit(bound: str, threshold: float | str, reference: Measured | None) -> float:
    if reference is None:
        return float(threshold)
    share = _share(threshold)
    change = share * abs(reference.value) if share is not None else float(threshold)
    return reference.value - change if bound == "max_drop" else reference.value + change
