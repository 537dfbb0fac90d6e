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
from dataclasses import dataclass, field
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
    """One line of `require`. All bounds that it has must hold."""

    metric: str = new_key(REQUIRED, "Name of a metric as metrics.jsonl has it; of a task: eval_tasks/TASK_METRIC")
    min: float | None = new_key(None, "The least that it may be")
    max: float | None = new_key(None, "The most that it may be")
    max_drop: float | str | None = new_key(
        None, "How far it may be below the baseline's value: a number, or a share of that value as 2%"
    )
    max_rise: float | str | None = new_key(None, "How far it may be above the baseline's value, likewise")
    window: int | str | None = new_key(
        None, "Last steps that count, a number or a share of the run as 10%; unset: the last value alone"
    )
    aggregate: Literal["mean", "min", "max", "last"] = new_key("mean", "What a window's values become")
    stderr_z: float | None = new_key(
        None, "Every bound must hold by so many standard errors, of the baseline's value too", ge=0
    )


@dataclass(frozen=True)
class GateKeys:
    """The keys of one stage in a file of gates."""

    require: tuple[Any, ...] = new_key(REQUIRED, "The requirements")
    baseline: str | None = new_key(None, "The stage that max_drop and max_rise compare with")


@dataclass(frozen=True)
class Gate:
    """The gate of one stage. baseline: the stage that max_drop and max_rise compare with; None: none does."""

    stage: str
    requirements: tuple[Requirement, ...]
    baseline: str | None = None


@dataclass(frozen=True)
class Check:
    """One bound of a requirement, judged: value `op` limit. limit: the bound, with the baseline's value and
    the standard errors taken into account. problem: why it is missing or not a number, "" otherwise."""

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
        """`validation/lm_loss 3.21 <= 2.9: fail`."""
        if self.value is None or self.limit is None:
            return f"{self.metric} ({self.bound} {self.given}): {self.result}: {self.problem}"
        operator = ">=" if self.bound in ("min", "max_drop") else "<="
        against = f" (baseline {self.baseline_value:.6g})" if self.baseline_value is not None else ""
        sure = f" by {self.stderr_z:g} standard errors of {self.stderr:.3g}" if self.stderr is not None else ""
        problem = f": {self.problem}" if self.problem else ""
        return f"{self.metric} {self.value:.6g} {operator} {self.limit:.6g}{against}{sure}: {self.result}{problem}"


@dataclass(frozen=True)
class Judgement:
    """All checks of a gate. A metric that is missing weighs more than one that fails: exit code 4, not 3."""

    gate: Gate
    checks: tuple[Check, ...] = field(default=())

    @property
    def result(self) -> Result:
        results = {check.result for check in self.checks}
        return MISSING if MISSING in results else FAIL if FAIL in results else PASS

    @property
    def exit_code(self) -> int:
        """0 passed, 3 failed, 4 a metric is missing."""
        return {PASS: 0, FAIL: GATE_FAILED, MISSING: METRIC_MISSING}[self.result]


def read_gates(file: Path, stages: Sequence[str]) -> dict[str, Gate]:
    """The gates in a file by stage. stages: those of the pipeline that may have one, in order.

    Raises ConfigError, a line `FILE:LINE: key: what is wrong` for each mistake.
    """
    origins: dict[str, str] = {}
    problems = ErrorCollector(origins)
    gates = {}
    for name, given in read_declared(file, origins, problems).items():
        if name not in stages:
            problems.add(str(name), f"is no training stage of the pipeline; there are {', '.join(stages) or 'none'}")
        elif not isinstance(given, Mapping):
            problems.add(name, "expected a mapping with require, and baseline where one is compared with")
        else:
            gates[name] = _gate(name, given, problems)
    for name, gate in gates.items():
        earlier = stages[: list(stages).index(name)]
        if gate.baseline is not None and gate.baseline not in earlier:
            problems.add(f"{name}.baseline", f"{gate.baseline} is no earlier stage; {', '.join(earlier) or 'none'} is")
    problems.raise_if_any()
    return gates


def _gate(name: str, given: Mapping[str, Any], problems: ErrorCollector) -> Gate:
    values = check_keys(GateKeys, given, problems, f"{name}.")
    listed = values["require"] or ()
    if values["require"] == ():
        problems.add(f"{name}.require", "is empty; a stage without a gate is left out")
    requirements = [
        _requirement(f"{name}.require.{i}", item, values["baseline"], problems) for i, item in enumerate(listed)
    ]
    return Gate(name, tuple(one for one in requirements if one is not None), values["baseline"])


def _requirement(path: str, item: Any, baseline: str | None, problems: ErrorCollector) -> Requirement | None:
    if not isinstance(item, Mapping):
        problems.add(path, "expected a mapping, as {metric: validation/lm_loss, max: 2.9}")
        return None
    before = len(problems.lines)
    values = check_keys(Requirement, dict(item), problems, f"{path}.")
    if len(problems.lines) > before:
        return None
    one = Requirement(**values)
    if not _bounds(one):
        problems.add(path, f"{one.metric}: bounds nothing; give min, max, max_drop or max_rise")
    for bound, value in _bounds(one):
        if isinstance(value, str) and not _SHARE.fullmatch(value):
            problems.add(f"{path}.{bound}", f'expected a number, or a share as 2%, got "{value}"')
        elif bound in ("max_drop", "max_rise") and not isinstance(value, str) and value < 0:
            problems.add(f"{path}.{bound}", f"expected at least 0, got {value}")
        if bound in ("max_drop", "max_rise") and baseline is None:
            problems.add(f"{path}.{bound}", "compares with nothing; set baseline, a stage, beside require")
    if one.min is not None and one.max is not None and one.min > one.max:
        problems.add(f"{path}.min", f"{one.min} is more than max {one.max}: nothing can pass")
    window = one.window
    share = _SHARE.fullmatch(window) if isinstance(window, str) else None
    if isinstance(window, str) and not (share and 0 < float(share[1]) <= 100):
        problems.add(f"{path}.window", f'expected a number of steps, or a share of the run as 10%, got "{window}"')
    if isinstance(window, int) and window < 1:
        problems.add(f"{path}.window", f"expected at least 1 step, got {window}")
    if window is None and one.aggregate != "mean":
        problems.add(f"{path}.aggregate", "says nothing without window")
    return one


def _bounds(one: Requirement) -> list[tuple[Bound, float | str]]:
    names: tuple[Bound, ...] = ("min", "max", "max_drop", "max_rise")
    return [(name, value) for name in names if (value := getattr(one, name)) is not None]


def judge(gate: Gate, measured: Measurements, baseline: Measurements | None) -> Judgement:
    """The gate's checks. baseline: the measurements of its baseline's promoted weights; None: there are
    none."""
    return Judgement(
        gate,
        tuple(
            _check(one, bound, given, measured, baseline) for one in gate.requirements for bound, given in _bounds(one)
        ),
    )


def _check(
    one: Requirement,
    bound: Bound,
    given: float | str,
    measured: Measurements,
    baseline: Measurements | None,
) -> Check:
    z = one.stderr_z
    try:
        here = _measure(one, measured)
        of_baseline: Measured | None = None
        if bound in ("max_drop", "max_rise"):
            if baseline is None:
                raise MissingError("the baseline stage has no promoted weights to compare with")
            try:
                of_baseline = _measure(one, baseline)
            except MissingError as problem:
                raise MissingError(f"of the baseline: {problem}") from None
    except MissingError as problem:
        return Check(one.metric, bound, given, MISSING, problem=str(problem))
    limit, error = _limit(bound, given, of_baseline), 0.0
    if z is not None:
        error = math.hypot(here.stderr or 0.0, (of_baseline.stderr or 0.0) if of_baseline is not None else 0.0)
    room = (z or 0.0) * error
    holds = here.value - room >= limit if bound in ("min", "max_drop") else here.value + room <= limit
    finite = all(map(math.isfinite, (here.value, limit, room)))
    return Check(
        one.metric, bound, given, PASS if holds and finite else FAIL, here.value, limit,
        error if z is not None else None, z, here.window,
        of_baseline.value if of_baseline is not None else None, of_baseline.stderr if of_baseline is not None else None,
        "" if finite else "not a finite number",
    )  # fmt: skip


def _measure(one: Requirement, measured: Measurements) -> Measured:
    found = measured.measure(one.metric, _window(one.window), one.aggregate)
    if one.stderr_z is not None and found.stderr is None:
        raise MissingError(f"stderr_z needs a standard error, and {one.metric} has none (a window of values has one)")
    return found


def _window(given: int | str | None) -> int | float | None:
    """Steps, or a share of the run between 0 and 1."""
    share = _SHARE.fullmatch(given) if isinstance(given, str) else None
    return float(share[1]) / 100 if share is not None else given  # type: ignore[return-value]


def _limit(bound: str, given: float | str, of_baseline: Measured | None) -> float:
    share = _SHARE.fullmatch(given) if isinstance(given, str) else None
    if of_baseline is None:
        return float(given)
    change = float(share[1]) / 100 * abs(of_baseline.value) if share is not None else float(given)
    return of_baseline.value - change if bound == "max_drop" else of_baseline.value + change
