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
from benchmarks.gpu_run.plan import History, Plan, Rank, Step, at_a_time, make_plan, side_by_side
from benchmarks.gpu_run.process import ROOT, Outcome, Stop, run_part

REHEARSAL_CARD = "cpu"
_SPARE_S = 2.0  # for writing the table at the end


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    kind: gpu, ablation or rehearsal. part_names: None for all parts. repeat: also run parts that passed
    before. work: folder for logs and caches. tables: folder of the results files of earlier runs.
    """

    kind: str
    minutes: float
    part_names: Sequence[str] | None
    repeat: bool
    output: Path | None
    work: Path
    tables: Path


def earlier_results(options: Options) -> memory.Memory:
    """Reads the results files of earlier runs, without rehearsals.

    Raises ValueError for a file that is not a results file."""
    tables = set(options.tables.glob("*.json"))
    if options.kind != "rehearsal" and options.output is not None and options.output.exists():
        tables.add(options.output)
    return memory.remember(sorted(tables), "ablation" if options.kind == "ablation" else "gpu")


def in_run(part: Part, options: Options) -> Part:
    """Returns the part as this run executes it: in a rehearsal, the tiny version for a CPU."""
    return rehearsed(part) if options.kind == "rehearsal" else part


def plan_of(
    all_parts: Sequence[Part], options: Options, past: memory.Memory, card: str | None, cores: int, limit_s: float
) -> Plan:
    """Plans a run on this card, on a machine with this number of cores. past: results of earlier runs."""
    runnable = {
        part.name: in_run(part, options) for part in all_parts if part.name != FACTS and not missing_packages(part)
    }
    chosen = [part for part in runnable.values() if options.part_names is None or part.name in options.part_names]
    compared = {name for part in chosen for name in (part.name, part.baseline)}
    codes = memory.codes([part for part in all_parts if part.name in compared], ROOT)
    history = History(past, codes, card, time.strftime("%Y-%m-%d"))
    return make_plan(chosen, runnable, history, at_a_time(cores), limit_s, options.repeat)


def print_plan(all_parts: Sequence[Part], options: Options, card: str | None) -> None:
    """Prints what a run would do, and runs nothing.

    card: name of a GPU in results files, or its beginning; None for the GPU of this machine. Raises
    ValueError if a file in the folder of results is not a results file."""
    past, device = earlier_results(options), card or ask_nvidia_smi("name")
    known_card = None if device is None else past.card(results.card_of(device))
    if options.kind == "rehearsal":
        known_card = REHEARSAL_CARD
    elif known_card is None:
        print("card unknown: no part counts as known, times are estimates; --card h200 names it")
    elif known_card not in past.cores:
        print(f"no table is of a card {known_card}: times are estimates")
    for package, names in lacking(all_parts, options.part_names).items():
        print(f"for want of {package} will be left out: {'; '.join(names)}")
    facts_s = next(part.typical_s for part in all_parts if part.name == FACTS)
    cores, limit_s = past.cores.get(known_card or "", cores_here()), 60 * options.minutes - facts_s - _SPARE_S
    print("\n".join(plan_of(all_parts, options, past, known_card, cores, limit_s).lines()))


def lacking(all_parts: Sequence[Part], part_names: Sequence[str] | None) -> dict[str, list[str]]:
    """Returns the chosen parts that cannot run, by the missing package that they need."""
    names_by_package: dict[str, list[str]] = {}
    for part in all_parts:
        if part_names is None or part.name in (FACTS, *part_names):
            for package in missing_packages(part):
                names_by_package.setdefault(package, []).append(part.name)
    return names_by_package


class Run:
    """Runs the parts of one command within its time limit, and writes the results file."""

    def __init__(self, all_parts: Sequence[Part], options: Options, stop: Stop) -> None:
        self.all_parts, self.options, self.stop = all_parts, options, stop
        self.end, self.started_at = time.monotonic() + 60 * options.minutes, time.strftime("%Y-%m-%dT%H:%M:%S")
        self.env = environment(options.kind == "rehearsal", options.work)
        self.path: Path | None = options.output
        self.header: dict[str, Any] = {
            "kind": options.kind, "date": time.strftime("%Y-%m-%d"), "commit": results.commit(),
            "minutes": options.minutes,
        }  # fmt: skip
        self.outcomes: dict[str, Outcome] = {}  # of the table: this run's, and what one of the same day left there
        self.run_outcomes: dict[str, Outcome] = {}  # of this run
        self.running: dict[str, Outcome] = {}  # as far as each has come
        self.lock = threading.Lock()  # of these three, the table and the screen

    def all(self) -> int:
        """Runs all planned parts, and returns the exit status.

        Raises ValueError if a file in the folder of results is not a results file."""
        facts = in_run(next(part for part in self.all_parts if part.name == FACTS), self.options)
        outcome = self._run(Step(facts, Rank.NEVER_PASSED, "at first", facts.typical_s), facts.limit_s)
        if outcome.result is None or self.stop.reason:
            sys.stderr.write(f"make gpu: {outcome.log or outcome.reason}\n")
            return 1
        machine = outcome.result
        self._begin(machine)
        self._end(facts, outcome)
        card, spare = results.card_of(machine["device"]), self.end - time.monotonic() - _SPARE_S
        plan = plan_of(self.all_parts, self.options, earlier_results(self.options), card, machine["cores"], spare)
        print("\n".join(plan.lines()), flush=True)
        for step in plan.deferred:
            self._leave_out(step)
        for step in plan.timed:
            self._do(step, reserve_s=side_by_side(plan.tests, plan.at_a_time))
        with ThreadPoolExecutor(plan.at_a_time) as pool:
            list(pool.map(self._do, plan.tests))
        return self._last_lines([FACTS, *(step.part.name for step in (*plan.timed, *plan.tests))])

    def _begin(self, machine: Mapping[str, Any]) -> None:
        """Chooses the results file, and loads the outcomes of an earlier run from it.

        Then prints the missing packages, and notes the parts that need them as left out. machine: the facts
        of the GPU."""
        self.header["device"] = machine["device"]
        usual = default_path(self.header, self.options)
        self.path = self.path or usual
        if self.options.kind != "rehearsal" or self.options.part_names is not None:
            earlier_table = next((path for path in (self.path, usual) if path.exists()), None)
            self.outcomes = results.earlier(earlier_table) if earlier_table is not None else {}
        print(f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}; to {_short(self.path)}")
        for package, names in lacking(self.all_parts, self.options.part_names).items():
            print(f"for want of {package} will be left out: {'; '.join(names)}")
            for name in names:
                self._keep(Outcome(name, "left out", reason=f"for want of {package}"))

    def _do(self, step: Step, reserve_s: float = 0.0) -> None:
        """Runs a part if its expected time is left. reserve_s: seconds to keep for later parts."""
        if self.stop.reason:
            return
        left = self.end - time.monotonic() - _SPARE_S - reserve_s
        if left < step.seconds:
            self._leave_out(step)
            return
        with self.lock:
            print(f"{step.part.name:<24} begins: {step.part.description}", flush=True)
        self._end(step.part, self._run(step, min(step.part.limit_s, left)))

    def _run(self, step: Step, limit_s: float) -> Outcome:
        part = step.part
        folder = self.options.work / re.sub(r"[^a-z0-9]+", "-", part.name.lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PASSED).write_text(json.dumps(sorted(step.passed_tests)), encoding="utf-8")

        def progress(outcome: Outcome) -> None:
            with self.lock:
                self.running[part.name] = replace(outcome, code=step.code, run=self.started_at)
                self._write()

        if part.name != FACTS:  # before which there is no table
            progress(Outcome(part.name, "running"))
        progress_function = progress if part.name != FACTS else lambda outcome: None
        return replace(
            run_part(part, folder, limit_s, self.env, progress_function, self.stop), code=step.code, run=self.started_at
        )

    def _end(self, part: Part, outcome: Outcome) -> None:
        with self.lock:
            self.running.pop(part.name, None)
            self.outcomes[part.name] = self.run_outcomes[part.name] = outcome
            self._write()
            for line in results.lines(outcome, self.outcomes, part.baseline):
                print(line, flush=True)

    def _leave_out(self, step: Step) -> None:
        self._keep(Outcome(step.part.name, "left out", reason=f"no time: it takes about {step.seconds:.0f} s"))

    def _keep(self, outcome: Outcome) -> None:
        """Notes a part that is left out. An earlier result of it in the results file is kept."""
        with self.lock:
            self.run_outcomes[outcome.name] = outcome
            if self.outcomes.get(outcome.name, outcome).state == "left out":
                self.outcomes[outcome.name] = outcome

    def _write(self) -> None:
        assert self.path is not None
        results.write(self.path, self.header, self.all_parts, {**self.outcomes, **self.running})

    def _last_lines(self, planned: Sequence[str]) -> int:
        """Writes the results file, prints a summary, and returns the exit status. planned: names of parts."""
        with self.lock:
            self._write()
        ended_outcomes = [outcome for outcome in self.run_outcomes.values() if outcome.state != "left out"]
        bad = [outcome.name for outcome in ended_outcomes if outcome.state != "passed"]
        deferred = [outcome.name for outcome in self.run_outcomes.values() if "no time" in outcome.reason]
        deferred += [name for name in planned if name not in self.run_outcomes]
        required = REQUIRED & set(lacking(self.all_parts, self.options.part_names))
        passed = len(ended_outcomes) - len(bad)
        print(f"{passed} of {len(planned)} parts passed" + (f"; not: {', '.join(bad)}" if bad else ""))
        for reason, count in Counter(
            outcome.reason for outcome in self.run_outcomes.values() if outcome.state == "left out"
        ).items():
            print(f"left out {count}, {reason}")
        if deferred:
            print(f"the same command again goes on with: {'; '.join(deferred)}")
        assert self.path is not None
        print(f"table: {_short(self.path)}")
        return 1 if bad or required or self.stop.reason else 0


def environment(rehearse: bool, work: Path) -> dict[str, str]:
    """Returns the environment variables of every part.

    They disable the Hub, set the GPU allocator as the launcher does, and name one cache of compiled kernels
    for all runs. A rehearsal sees no GPU."""
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
    return [name for name in part.packages if find_spec(name) is None]


def default_path(header: Mapping[str, Any], options: Options) -> Path:
    """Returns the default path of the results file; for a rehearsal it is in the folder of logs."""
    if options.kind == "rehearsal":
        return options.work / "rehearsal.json"
    ablation = "-ablation" if options.kind == "ablation" else ""
    return options.tables / f"{header['date']}-{results.card_of(header['device'])}{ablation}.json"


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
