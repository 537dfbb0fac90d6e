"""Tunes what programs reach of data sheets, by the published throughputs of list A. List B is never read.

It changes one number after another, by steps that become smaller, and keeps what makes predictions better.
Numbers are held near their first values, and rows that are far off count less than their square. It prints
both tables.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import published_runs as runs
from megatron.launch.gpus import read_gpus
from megatron.planning.machines import Reached, read_links, read_reached
from megatron.planning.processes import Processes
from megatron.process import run_command
from megatron.process.command_parser import CommandParser

_PROJECT, _PROJECT_COUNT = "this project", 3.0
_STEPS = (0.15, 0.15, 0.08, 0.08, 0.04, 0.04, 0.02, 0.02)
_FREE = ("overlap", "host", "memory", "tensor")  # less is known of these
_LIMITS = {"product": (0.3, 0.95), "fp8_product": (0.3, 0.9), "grouped": (0.2, 1.0), "attention": (0.15, 0.8),
           "copy": (0.4, 0.95)}  # fmt: skip
_BACKWARD = 0.82  # of what attention reaches forward


class Number(NamedTuple):
    """A number of a table. owner: a generation of GPUs, or a framework."""

    owner: str
    name: str


class Tuning:
    """The rows of list A, their predictions, and the numbers that these depend on."""

    def __init__(self, rows: list[dict[str, Any]], traces: list[Any]) -> None:
        self.rows, self._links, self._gpus = rows, read_links(), read_gpus()
        self.reached = {name: read_reached(name) for name in runs.GENERATIONS}
        self.frameworks = runs.read_frameworks()
        owners = [(self._framework(row), self._gpus[row["gpu"]].generation) for row in rows]
        self._owners = owners
        self._models = [runs.model_of(row, trace, runs.framework_of(row, self.frameworks), self._machine(row))
                        for row, trace in zip(rows, traces, strict=True)]  # fmt: skip
        self.errors = [self._error(i) for i in range(len(rows))]
        self.initial_values = {number: self.value(number) for number in self._numbers()}

    def _framework(self, row: Mapping[str, Any]) -> str:
        return max((name for name in self.frameworks if row["framework"].startswith(name)), key=len)

    def _machine(self, row: Mapping[str, Any]) -> Any:
        framework = runs.framework_of(row, self.frameworks)
        return runs.machine_of(row, framework, self.reached, self._links)

    def _error(self, i: int) -> float:
        """Returns the logarithm of the predicted throughput over the published one."""
        row = self.rows[i]
        model = self._models[i].on(self._machine(row))
        return math.log(runs.tokens_per_second(row, model) / row["tokens_per_s"])

    def _numbers(self) -> Iterator[Number]:
        row_owners = {owner for owners in self._owners for owner in owners}
        for generation in self.reached:
            yield from (Number(generation, name) for name in Reached._fields
                        if name not in ("launch", "tensor", "attention_backward"))  # fmt: skip
        for framework in self.frameworks:
            if framework in row_owners and framework != _PROJECT:
                names = ("product", "attention", "memory", "overlap", "host", "tensor")
                yield from (Number(framework, name) for name in names)

    def value(self, number: Number) -> float:
        table: Mapping[str, Any] = self.reached if number.owner in self.reached else self.frameworks
        return float(getattr(table[number.owner], number.name))

    def set(self, number: Number, value: float) -> None:
        if number.owner in self.reached:
            changes = {number.name: value}
            if number.name == "attention":
                changes["attention_backward"] = _BACKWARD * value
            self.reached[number.owner] = self.reached[number.owner]._replace(**changes)
        else:
            changed: dict[str, Any] = {number.name: value}
            self.frameworks[number.owner] = self.frameworks[number.owner]._replace(**changed)

    def improve(self, step: float) -> int:
        """Changes each number by a factor of 1 + step, or divides by it, if that is better. Returns how many
        have changed."""
        changed = 0
        for number, initial_value in self.initial_values.items():
            places = [i for i, owners in enumerate(self._owners) if number.owner in owners]
            best, old = self._cost(number, initial_value, places), self.value(number)
            limits = _LIMITS if number.owner in self.reached else {"host": (0.2, 20.0)}
            low, high = limits.get(number.name, (0.2, 6.0))
            for value in (old * (1 + step), old / (1 + step)):
                old_errors = [self.errors[i] for i in places]
                if not low <= value <= (1.0 if number.name == "tensor" else high):
                    continue
                self.set(number, value)
                for i in places:
                    self.errors[i] = self._error(i)
                if self._cost(number, initial_value, places) < best - 1e-6:
                    changed += 1
                    break
                self.set(number, old)
                for i, error in zip(places, old_errors, strict=True):
                    self.errors[i] = error
        return changed

    def _cost(self, number: Number, initial_value: float, places: list[int]) -> float:
        distance = math.log(self.value(number) / initial_value) ** 2 * (0.3 if number.name in _FREE else 1.0)
        counts = (_PROJECT_COUNT if self.rows[i]["framework"] == _PROJECT else 1.0 for i in places)
        return 0.9 * distance + sum(count * _loss(self.errors[i]) for i, count in zip(places, counts, strict=True))


def _loss(error: float) -> float:
    size = abs(error)
    return size * size if size < 0.2 else 0.4 * size - 0.04


def main() -> None:
    """Prints the tuned tables."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="processes that record steps; default: 2")
    parser.add_argument("--cache", type=Path, help="folder of recorded steps")
    options = parser.parse_args()
    rows = runs.read_rows("a")
    with Processes(options.processes) as processes:
        tuning = Tuning(rows, runs.traces(rows, processes, options.cache))
    for step in _STEPS:
        changed = tuning.improve(step)
        mean = statistics.mean(abs(math.expm1(error)) for error in tuning.errors)
        print(f"steps of {step:.0%}: {changed} numbers changed, mean error {mean:.1%}", file=sys.stderr, flush=True)
    for title, table in (("reached.toml", tuning.reached), ("frameworks.toml", tuning.frameworks)):
        print(f"# {title}")
        for name, entry in table.items():
            values = {key: f"{value:.3g}" if isinstance(value, float) else str(value).lower()
                      for key, value in entry._asdict().items()}  # fmt: skip
            print(f'\n["{name}"]\n' + "\n".join(f"{key} = {value}" for key, value in values.items()))


if __name__ == "__main__":
    run_command(main)
