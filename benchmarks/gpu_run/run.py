"""One `make gpu`: facts of the machine, the plan, timed parts alone, tests side by side, and the table."""

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_run import memory, results
from benchmarks.gpu_run.facts import ask_nvidia_smi, cores_here
from benchmarks.gpu_run.parts import FACTS, PASSED, REQUIRED, Part, rehearsed
from benchmarks.gpu_run.plan import Known, Plan, Rank, Step, at_a_time, make_plan, side_by_side
from benchmarks.gpu_run.process import ROOT, Outcome, Stop, run_part

REHEARSAL_CARD = "cpu"
_SPARE_S = 2.0  # for writing the table at the end


@dataclass(frozen=True)
class Options:
    """What the command line asks for. kind: gpu, ablation or rehearsal; only: names of parts, None for all;
    work: folder of logs and caches; tables: folder of the tables of earlier runs."""

    kind: str
    minutes: float
    only: Sequence[str] | None
    again: bool
    output: Path | None
    work: Path
    tables: Path


def remembered(options: Options) -> memory.Memory:
    """What earlier tables say; those of rehearsals are not among them. Raises ValueError for a file that is
    no table."""
    tables = set(options.tables.glob("*.json"))
    if options.kind != "rehearsal" and options.output is not None and options.output.exists():
        tables.add(options.output)
    return memory.remember(sorted(tables), "ablation" if options.kind == "ablation" else "gpu")


def in_run(part: Part, options: Options) -> Part:
    """The part as it is run, on a CPU where it is rehearsed."""
    return rehearsed(part) if options.kind == "rehearsal" else part


def plan_of(
    every: Sequence[Part], options: Options, past: memory.Memory, card: str | None, cores: int, limit_s: float
) -> Plan:
    """The plan of a run on such a card, on a machine with so many cores."""
    runnable = {part.name: in_run(part, options) for part in every if part.name != FACTS and not missing_packages(part)}
    chosen = [part for part in runnable.values() if options.only is None or part.name in options.only]
    compared = {name for part in chosen for name in (part.name, part.beside)}
    codes = memory.codes([part for part in every if part.name in compared], ROOT)
    known = Known(past, codes, card, time.strftime("%Y-%m-%d"))
    return make_plan(chosen, runnable, known, at_a_time(cores), limit_s, options.again)


def print_plan(every: Sequence[Part], options: Options, card: str | None) -> None:
    """Print what a run would do, without running anything. card: as in the names of tables, or its beginning;
    None for that of this machine. Raises ValueError for a file among the tables that is none."""
    past, device = remembered(options), card or ask_nvidia_smi("name")
    known_card = None if device is None else past.card(results.card_of(device))
    if options.kind == "rehearsal":
        known_card = REHEARSAL_CARD
    elif known_card is None:
        print("card unknown: no part counts as known, times are estimates; --card h200 names it")
    elif known_card not in past.cores:
        print(f"no table is of a card {known_card}: times are estimates")
    for package, names in lacking(every, options.only).items():
        print(f"for want of {package} will be left out: {'; '.join(names)}")
    facts_s = next(part.typical_s for part in every if part.name == FACTS)
    cores, limit_s = past.cores.get(known_card or "", cores_here()), 60 * options.minutes - facts_s - _SPARE_S
    print("\n".join(plan_of(every, options, past, known_card, cores, limit_s).lines()))


def lacking(every: Sequence[Part], only: Sequence[str] | None) -> dict[str, list[str]]:
    """Names of chosen parts by each package that they need and that is not installed."""
    parts_without: dict[str, list[str]] = {}
    for part in every:
        if only is None or part.name in (FACTS, *only):
            for package in missing_packages(part):
                parts_without.setdefault(package, []).append(part.name)
    return parts_without


class Run:
    """The parts of one command within its time."""

    def __init__(self, every: Sequence[Part], options: Options, stop: Stop) -> None:
        self.every, self.options, self.stop = every, options, stop
        self.end, self.began = time.monotonic() + 60 * options.minutes, time.strftime("%Y-%m-%dT%H:%M:%S")
        self.env = environment(options.kind == "rehearsal", options.work)
        self.path: Path | None = options.output
        self.about: dict[str, Any] = {
            "kind": options.kind, "date": time.strftime("%Y-%m-%d"), "commit": results.commit(),
            "minutes": options.minutes,
        }  # fmt: skip
        self.outcomes: dict[str, Outcome] = {}  # of the table: this run's, and what one of the same day left there
        self.mine: dict[str, Outcome] = {}  # of this run
        self.running: dict[str, Outcome] = {}  # as far as each has come
        self.lock = threading.Lock()  # of these three, the table and the screen

    def all(self) -> int:
        """Run everything; the exit status. Raises ValueError for a file among the tables that is none."""
        facts = in_run(next(part for part in self.every if part.name == FACTS), self.options)
        outcome = self._run(Step(facts, Rank.NEVER_PASSED, "at first", facts.typical_s), facts.limit_s)
        if outcome.result is None or self.stop.reason:
            sys.stderr.write(f"make gpu: {outcome.log or outcome.reason}\n")
            return 1
        machine = outcome.result
        self._begin(machine)
        self._end(facts, outcome)
        card, spare = results.card_of(machine["device"]), self.end - time.monotonic() - _SPARE_S
        plan = plan_of(self.every, self.options, remembered(self.options), card, machine["cores"], spare)
        print("\n".join(plan.lines()), flush=True)
        for step in plan.late:
            self._leave_out(step)
        for step in plan.timed:
            self._do(step, reserve_s=side_by_side(plan.tests, plan.at_a_time))
        with ThreadPoolExecutor(plan.at_a_time) as pool:
            list(pool.map(self._do, plan.tests))
        return self._last_lines([FACTS, *(step.part.name for step in (*plan.timed, *plan.tests))])

    def _begin(self, machine: Mapping[str, Any]) -> None:
        """Take the table's name from the card, keep what a run of the same day left there, and say which
        packages are missing."""
        self.about["device"] = machine["device"]
        usual = default_path(self.about, self.options)
        self.path = self.path or usual
        if self.options.kind != "rehearsal" or self.options.only is not None:
            before = next((path for path in (self.path, usual) if path.exists()), None)
            self.outcomes = results.earlier(before) if before is not None else {}
        print(f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}; to {_short(self.path)}")
        for package, names in lacking(self.every, self.options.only).items():
            print(f"for want of {package} will be left out: {'; '.join(names)}")
            for name in names:
                self._keep(Outcome(name, "left out", reason=f"for want of {package}"))

    def _do(self, step: Step, reserve_s: float = 0.0) -> None:
        """Run a part, where so much time is left beside what parts after it need."""
        if self.stop.reason:
            return
        left = self.end - time.monotonic() - _SPARE_S - reserve_s
        if left < step.seconds:
            self._leave_out(step)
            return
        with self.lock:
            print(f"{step.part.name:<24} begins: {step.part.about}", flush=True)
        self._end(step.part, self._run(step, min(step.part.limit_s, left)))

    def _run(self, step: Step, limit_s: float) -> Outcome:
        part = step.part
        folder = self.options.work / re.sub(r"[^a-z0-9]+", "-", part.name.lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PASSED).write_text(json.dumps(sorted(step.passed_tests)), encoding="utf-8")

        def progress(outcome: Outcome) -> None:
            with self.lock:
                self.running[part.name] = replace(outcome, code=step.code, run=self.began)
                self._write()

        if part.name != FACTS:  # before which there is no table
            progress(Outcome(part.name, "running"))
        told = progress if part.name != FACTS else lambda outcome: None
        return replace(run_part(part, folder, limit_s, self.env, told, self.stop), code=step.code, run=self.began)

    def _end(self, part: Part, outcome: Outcome) -> None:
        with self.lock:
            self.running.pop(part.name, None)
            self.outcomes[part.name] = self.mine[part.name] = outcome
            self._write()
            for line in results.lines(outcome, self.outcomes, part.beside):
                print(line, flush=True)

    def _leave_out(self, step: Step) -> None:
        self._keep(Outcome(step.part.name, "left out", reason=f"no time: it takes about {step.seconds:.0f} s"))

    def _keep(self, outcome: Outcome) -> None:
        """Note a part that is left out; what the table has of an earlier run of it stays."""
        with self.lock:
            self.mine[outcome.name] = outcome
            if self.outcomes.get(outcome.name, outcome).state == "left out":
                self.outcomes[outcome.name] = outcome

    def _write(self) -> None:
        assert self.path is not None
        results.write(self.path, self.about, self.every, {**self.outcomes, **self.running})

    def _last_lines(self, planned: Sequence[str]) -> int:
        """Write the table, and say in a few lines how it ended; the exit status."""
        with self.lock:
            self._write()
        ended = [one for one in self.mine.values() if one.state != "left out"]
        bad = [one.name for one in ended if one.state != "passed"]
        late = [one.name for one in self.mine.values() if "no time" in one.reason]
        late += [name for name in planned if name not in self.mine]
        required = REQUIRED & set(lacking(self.every, self.options.only))
        passed = len(ended) - len(bad)
        print(f"{passed} of {len(planned)} parts passed" + (f"; not: {', '.join(bad)}" if bad else ""))
        for reason, count in Counter(one.reason for one in self.mine.values() if one.state == "left out").items():
            print(f"left out {count}, {reason}")
        if late:
            print(f"the same command again goes on with: {'; '.join(late)}")
        assert self.path is not None
        print(f"table: {_short(self.path)}")
        return 1 if bad or required or self.stop.reason else 0


def environment(rehearse: bool, work: Path) -> dict[str, str]:
    """Variables of every part: no network, memory of GPUs as the launcher sets it, and one cache of compiled
    kernels for all parts and runs. A rehearsal sees no GPU."""
    env = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "compiled" / "inductor"),
        "TRITON_CACHE_DIR": str(work / "compiled" / "triton"),
    }  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if rehearse:
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return env


def missing_packages(part: Part) -> list[str]:
    return [name for name in part.needs if find_spec(name) is None]


def default_path(about: Mapping[str, Any], options: Options) -> Path:
    """Where the table goes: a rehearsal's beside its logs, for it says nothing of a GPU."""
    if options.kind == "rehearsal":
        return options.work / "rehearsal.json"
    ablation = "-ablation" if options.kind == "ablation" else ""
    return options.tables / f"{about['date']}-{results.card_of(about['device'])}{ablation}.json"


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
