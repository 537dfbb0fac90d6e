"""The order of a run: first what never passed, then what changed since, then what passed on other cards."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from benchmarks.gpu_run.memory import Memory, Pass
from benchmarks.gpu_run.parts import Part

MOST_AT_A_TIME, CORES_OF_A_PART = 5, 4


class Rank(IntEnum):
    """What runs first."""

    NEVER_PASSED = 0
    CHANGED = 1
    PASSED = 2


@dataclass(frozen=True)
class Step:
    """A part to run. why: it has this rank, in words; seconds: as long as it should take; code: digest of its
    files; passed_tests: of its tests, which run last."""

    part: Part
    rank: Rank
    why: str
    seconds: float
    code: str = ""
    passed_tests: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """timed: run alone, one after another; tests: after these, `at_a_time` side by side. late: what does not
    fit into `limit_s`. known: parts that are left out, with the table that has them. seconds: of all."""

    timed: Sequence[Step]
    tests: Sequence[Step]
    late: Sequence[Step]
    known: Mapping[str, str]
    at_a_time: int
    limit_s: float

    @property
    def seconds(self) -> float:
        return alone(self.timed) + side_by_side(self.tests, self.at_a_time)

    def lines(self) -> list[str]:
        """What is printed before anything runs."""
        made = [f"plan: {self.seconds:.0f} s of {self.limit_s:.0f} s that are left"]
        made += [_line(step) for step in self.timed]
        if self.tests:
            made.append(f"then tests, {self.at_a_time} at a time:")
            made += [_line(step) for step in self.tests]
        if self.late:
            made += [f"does not fit, {alone(self.late):.0f} s:", *map(_line, self.late)]
        if self.known:
            made.append("known of the same files and card, left out (--again repeats):")
            made += [f"         {name}: {table}" for name, table in self.known.items()]
        return made


def _line(step: Step) -> str:
    return f"  {step.seconds:4.0f} s {step.part.name}: {step.why}"


def at_a_time(cores: int) -> int:
    """How many parts of tests a machine runs side by side."""
    return max(1, min(MOST_AT_A_TIME, cores // CORES_OF_A_PART))


def alone(steps: Sequence[Step]) -> float:
    """Seconds of steps one after another."""
    return sum(step.seconds for step in steps)


def side_by_side(steps: Sequence[Step], at_a_time: int) -> float:
    """Seconds until the last has ended where each begins, in order, as soon as fewer than `at_a_time` run."""
    ends = [0.0] * at_a_time
    for step in steps:
        heapq.heapreplace(ends, ends[0] + step.seconds)
    return max(ends)


@dataclass(frozen=True)
class Known:
    """What is known before a run. codes: digests by part; card: None where it is unknown, so that no part is
    known; today: `2026-11-27`."""

    memory: Memory
    codes: Mapping[str, str]
    card: str | None
    today: str

    def same_code(self, part: Part) -> list[Pass]:
        """Passes of a part with its files as they are now, the newest first."""
        code = self.codes[part.name]
        return [one for one in self.memory.passes.get(part.name, ()) if code and one.code == code]

    def here(self, part: Part) -> list[Pass]:
        """Those on this card."""
        return [one for one in self.same_code(part) if one.card == self.card]

    def step(self, part: Part) -> Step:
        passes, same = self.memory.passes.get(part.name, ()), self.same_code(part)
        if same:
            rank, why = Rank.PASSED, f"passed on {same[0].card}, {same[0].date}"
        elif passes:
            rank, why = Rank.CHANGED, f"changed since {passes[0].date}"
        else:
            rank, why = Rank.NEVER_PASSED, "never passed"
        passed_tests = self.memory.tests.get(part.name, frozenset())
        return Step(part, rank, why, self.memory.seconds(part, self.card), self.codes[part.name], passed_tests)

    def age(self, step: Step) -> tuple[Rank, str]:
        """Sorts steps: by rank, and those that passed by day, the oldest first."""
        return step.rank, self.same_code(step.part)[0].date if step.rank is Rank.PASSED else ""


def make_plan(
    chosen: Sequence[Part], runnable: Mapping[str, Part], known: Known, at_a_time: int, limit_s: float, again: bool
) -> Plan:
    """Put chosen parts in order, as many as fit. again: known parts too.

    A part that is compared brings its partner of `runnable` along, since clocks are others in another run. Of
    tests of a rank those that take longest begin first.
    """
    table_of = {part.name: here[0].table for part in chosen if not again and (here := known.here(part))}
    waiting = sorted((known.step(part) for part in chosen if part.name not in table_of), key=known.age)
    timed: list[Step] = []
    tests: list[Step] = []
    late: list[Step] = []
    for step in waiting:
        planned = {one.part.name for one in timed}
        if step.part.name in planned:  # another has brought it along
            continue
        new, partner = [step], runnable.get(step.part.beside or "")
        if partner and partner.name not in planned:
            new.insert(0, replace(known.step(partner), why=f"beside {step.part.name}"))
        more_timed = timed + [one for one in new if not one.part.tests]
        more_tests = tests + [one for one in new if one.part.tests]
        more_tests.sort(key=lambda one: (one.rank, -one.seconds))
        if alone(more_timed) + side_by_side(more_tests, at_a_time) <= limit_s:
            timed, tests = more_timed, more_tests
        else:
            late.append(step)
    planned = {step.part.name for step in timed}
    late = [step for step in late if step.part.name not in planned]
    left_out = {name: table for name, table in table_of.items() if name not in planned}
    return Plan(timed, tests, late, left_out, at_a_time, limit_s)
