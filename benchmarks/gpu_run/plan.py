"""Orders the parts of a run: those that never passed, then changed ones, then those passed on other cards."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from benchmarks.gpu_run.memory import Memory, Pass
from benchmarks.gpu_run.parts import Part

MOST_AT_A_TIME, CORES_OF_A_PART = 5, 4


class Rank(IntEnum):
    """The priority of a step; lower values run first. CHANGED: its code changed since it passed."""

    NEVER_PASSED = 0
    CHANGED = 1
    PASSED = 2


@dataclass(frozen=True)
class Step:
    """A part to run.

    reason: text that explains the rank. seconds: expected time. code: digest of its files.
    passed_tests: names of its tests that passed before, which run last.
    """

    part: Part
    rank: Rank
    reason: str
    seconds: float
    code: str = ""
    passed_tests: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """The parts of a run, in order.

    timed: benchmarks, run alone, one after another. tests: run afterwards, `at_a_time` in parallel. deferred:
    steps that do not fit into `limit_s`. skipped: by part that passed before, the results file that says so.
    """

    timed: Sequence[Step]
    tests: Sequence[Step]
    deferred: Sequence[Step]
    skipped: Mapping[str, str]
    at_a_time: int
    limit_s: float

    @property
    def seconds(self) -> float:
        return total_seconds(self.timed) + side_by_side(self.tests, self.at_a_time)

    def lines(self) -> list[str]:
        """Returns the text that is printed before the run, as lines."""
        text_lines = [f"plan: {self.seconds:.0f} s of {self.limit_s:.0f} s that are left"]
        text_lines += [_line(step) for step in self.timed]
        if self.tests:
            text_lines.append(f"then tests, {self.at_a_time} at a time:")
            text_lines += [_line(step) for step in self.tests]
        if self.deferred:
            text_lines += [f"does not fit, {total_seconds(self.deferred):.0f} s:", *map(_line, self.deferred)]
        if self.skipped:
            text_lines.append("known of the same files and card, left out (--again repeats):")
            text_lines += [f"         {name}: {table}" for name, table in self.skipped.items()]
        return text_lines


def _line(step: Step) -> str:
    return f"  {step.seconds:4.0f} s {step.part.name}: {step.reason}"


def at_a_time(cores: int) -> int:
    """Returns how many test parts run in parallel on a machine with this number of cores."""
    return max(1, min(MOST_AT_A_TIME, cores // CORES_OF_A_PART))


def total_seconds(steps: Sequence[Step]) -> float:
    """Returns the expected seconds of steps that run one after another."""
    return sum(step.seconds for step in steps)


def side_by_side(steps: Sequence[Step], at_a_time: int) -> float:
    """Returns the expected seconds of steps that run `at_a_time` in parallel, started in this order."""
    ends = [0.0] * at_a_time
    for step in steps:
        heapq.heapreplace(ends, ends[0] + step.seconds)
    return max(ends)


@dataclass(frozen=True)
class History:
    """Earlier results, and the code and GPU of this run.

    codes: digests by part. card: kind of GPU; if None, no part is skipped. today: as `2026-11-27`.
    """

    memory: Memory
    codes: Mapping[str, str]
    card: str | None
    today: str

    def same_code(self, part: Part) -> list[Pass]:
        """Returns the successes of a part with its present code, on any card, the newest first."""
        code = self.codes[part.name]
        return [
            passed_part for passed_part in self.memory.passes.get(part.name, ()) if code and passed_part.code == code
        ]

    def passes_on_card(self, part: Part) -> list[Pass]:
        """Returns the successes of a part with its present code on this card, the newest first."""
        return [passed_part for passed_part in self.same_code(part) if passed_part.card == self.card]

    def step(self, part: Part) -> Step:
        passes, passes_of_code = self.memory.passes.get(part.name, ()), self.same_code(part)
        if passes_of_code:
            rank, reason = Rank.PASSED, f"passed on {passes_of_code[0].card}, {passes_of_code[0].date}"
        elif passes:
            rank, reason = Rank.CHANGED, f"changed since {passes[0].date}"
        else:
            rank, reason = Rank.NEVER_PASSED, "never passed"
        passed_tests = self.memory.tests.get(part.name, frozenset())
        return Step(part, rank, reason, self.memory.seconds(part, self.card), self.codes[part.name], passed_tests)

    def age(self, step: Step) -> tuple[Rank, str]:
        """Returns the sort key of a step: its rank, then the date of its last success."""
        return step.rank, self.same_code(step.part)[0].date if step.rank is Rank.PASSED else ""


def make_plan(
    chosen: Sequence[Part], runnable: Mapping[str, Part], history: History, at_a_time: int, limit_s: float, repeat: bool
) -> Plan:
    """Plans the chosen parts, as many as fit into `limit_s`. repeat: include parts that passed on this card.

    A part with a baseline adds the baseline from `runnable`, because GPU clocks differ between runs. Among
    tests of equal rank, the longest start first.
    """
    table_of = {
        part.name: passes[0].table for part in chosen if not repeat and (passes := history.passes_on_card(part))
    }
    waiting = sorted((history.step(part) for part in chosen if part.name not in table_of), key=history.age)
    timed: list[Step] = []
    tests: list[Step] = []
    deferred: list[Step] = []
    for step in waiting:
        planned = {planned_step.part.name for planned_step in timed}
        if step.part.name in planned:  # another has brought it along
            continue
        new_steps, partner = [step], runnable.get(step.part.baseline or "")
        if partner and partner.name not in planned:
            new_steps.insert(0, replace(history.step(partner), reason=f"beside {step.part.name}"))
        timed_with_new = timed + [planned_step for planned_step in new_steps if not planned_step.part.tests]
        tests_with_new = tests + [planned_step for planned_step in new_steps if planned_step.part.tests]
        tests_with_new.sort(key=lambda planned_step: (planned_step.rank, -planned_step.seconds))
        if total_seconds(timed_with_new) + side_by_side(tests_with_new, at_a_time) <= limit_s:
            timed, tests = timed_with_new, tests_with_new
        else:
            deferred.append(step)
    planned = {step.part.name for step in timed}
    deferred = [step for step in deferred if step.part.name not in planned]
    left_out = {name: table for name, table in table_of.items() if name not in planned}
    return Plan(timed, tests, deferred, left_out, at_a_time, limit_s)
