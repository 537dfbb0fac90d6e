"""What `make gpu` runs: on one GPU, correctness in the order in which one thing needs another, and speed.

Every part is a process of its own with a time limit, so that one that crashes or runs out of memory takes no
other with it, and one model at a time is in memory. A line says what became of each; the table is written
again after every part, to benchmarks/results/<date>-<gpu>.json: a run that is cut leaves what it has. Parts
for which no time is left, or a package is missing, are named as left out. Nothing is fetched from a network.

  make gpu                                   everything, in 9.5 minutes at most
  make gpu ARGS='--minutes 20'               with more time
  make gpu ARGS='--only attention "1.4B, native"'    some parts; a table of the same day keeps its others
  make gpu ARGS=--ablate                     what each key costs or gives in a step of the 1.4B shape
  make gpu-rehearsal                         every part on a CPU, with gloo, at tiny size

Exit status: 0, or 1 where a part has failed, was cut, or was left out for want of a package that training
itself needs.
"""

import argparse
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_run import results
from benchmarks.gpu_run.parts import FACTS, REQUIRED, Part, ablations, parts, rehearsed
from benchmarks.gpu_run.process import ROOT, Ended, Outcome, run_part

WORK = ROOT / ".cache" / "gpu"
_SPARE_S = 2.0  # for writing the table at the end


class Run:
    """The parts of one command, in order, within its time."""

    def __init__(self, chosen: Sequence[Part], known: Sequence[Part], options: argparse.Namespace) -> None:
        self.chosen, self.known, self.rehearse = chosen, known, options.rehearse
        self.end = time.monotonic() + 60 * options.minutes
        self.env = environment(options.rehearse)
        self.path: Path | None = options.output
        kind = "rehearsal" if options.rehearse else "ablation" if options.ablate else "gpu"
        self.about: dict[str, Any] = {
            "kind": kind, "date": time.strftime("%Y-%m-%d"), "commit": results.commit(), "minutes": options.minutes,
        }  # fmt: skip
        self.outcomes: dict[str, Outcome] = {}
        self.running = Outcome("", "running")  # the part at work, as far as it has come

    def all(self) -> int:
        """Run everything; the exit status."""
        for part in self.chosen:
            try:
                self.outcomes[part.name] = self._one(part)
            except Ended as problem:
                self.outcomes[part.name] = replace(self.running, state="cut", reason=str(problem))
                self._show(part)
                return self._last_lines()
            if part.name == FACTS:
                if self.outcomes[FACTS].result is None:
                    sys.stderr.write(f"make gpu: {self.outcomes[FACTS].log or self.outcomes[FACTS].reason}\n")
                    return 1
                self._begin(self.outcomes[FACTS].result or {})
            self._write()
            if not missing_packages(part):  # which was said at first
                self._show(part)
        return self._last_lines()

    def _one(self, part: Part) -> Outcome:
        self.running = Outcome(part.name, "running")
        missing = missing_packages(part)
        if missing:
            return Outcome(part.name, "left out", reason=f"for want of {', '.join(missing)}")
        left = self.end - time.monotonic() - _SPARE_S
        if left < part.typical_s:
            return Outcome(part.name, "left out", reason=f"no time: it takes about {part.typical_s:.0f} s")
        if part.name != FACTS:
            print(f"{part.name:<24} begins: {part.about}", flush=True)
            self._write({part.name: Outcome(part.name, "running")})
        folder = WORK / re.sub(r"[^a-z0-9]+", "-", part.name.lower()).strip("-")

        def progress(outcome: Outcome) -> None:
            self.running = outcome
            if self.path is not None and part.name != FACTS:  # until then `path` may hold an earlier run's
                self._write({part.name: outcome})

        return run_part(part, folder, min(part.limit_s, left), self.env, progress)

    def _begin(self, facts: Mapping[str, Any]) -> None:
        """Take the file's name from the GPU's, keep what an earlier run of some parts left there, and say
        what will be left out."""
        self.about["device"] = facts["device"]
        self.path = self.path or default_path(self.about)
        if self.path.exists() and len(self.chosen) < len(self.known):
            self.outcomes = {**results.earlier(self.path), **self.outcomes}
        print(f"{facts['device']}, torch {facts['torch']}, Python {facts['python']}; to {_short(self.path)}")
        lacking: dict[str, list[str]] = {}
        for part in self.chosen:
            for name in missing_packages(part):
                lacking.setdefault(name, []).append(part.name)
        for name, without in lacking.items():
            print(f"for want of {name} will be left out: {'; '.join(without)}")
        sys.stdout.flush()

    def _write(self, running: Mapping[str, Outcome] | None = None) -> None:
        assert self.path is not None
        results.write(self.path, self.about, self.known, {**self.outcomes, **(running or {})})

    def _show(self, part: Part) -> None:
        outcome = self.outcomes[part.name]
        measured = results.summary(outcome, self.outcomes, part.beside)
        words = "; ".join(filter(None, (measured, outcome.reason)))
        print(f"{part.name:<24} {outcome.state}, {outcome.seconds:.0f} s: {words}", flush=True)
        for row in outcome.tests:
            if row["outcome"] == "failed":
                print(f"    failed {row['name']}: {row['reason'].splitlines()[0] if row['reason'] else ''}")
        skipped = Counter(row["reason"] for row in outcome.tests if row["outcome"] == "skipped")
        for reason, count in skipped.items():
            print(f"    skipped {count}: {reason}")
        if outcome.log and not outcome.tests:
            print("    " + "\n    ".join(outcome.log.splitlines()[-12:]))

    def _last_lines(self) -> int:
        """Write the table, and say in a line or two how it ended."""
        if self.path is None:
            return 1
        self._write()
        mine = [self.outcomes[part.name] for part in self.chosen if part.name in self.outcomes]
        bad = [one.name for one in mine if one.state in ("failed", "cut")]
        out = [one for one in mine if one.state == "left out"]
        lacking = [part.name for part in self.chosen if REQUIRED & set(missing_packages(part))]
        begun = {one.name for one in mine}
        late = [one.name for one in out if "no time" in one.reason] + [
            p.name for p in self.chosen if p.name not in begun
        ]
        passed = sum(one.state == "passed" for one in mine)
        print(f"{passed} of {len(self.chosen)} parts passed" + (f"; not: {', '.join(bad)}" if bad else ""))
        for reason, count in Counter(one.reason for one in out).items():
            print(f"left out {count}, {reason}")
        if late:
            names = " ".join(f'"{name}"' if " " in name else name for name in late)
            print(f"the rest: make gpu ARGS='--only {names}'")
        print(f"table: {_short(self.path)}")
        return 1 if bad or lacking or len(begun) < len(self.chosen) else 0


def environment(rehearse: bool) -> dict[str, str]:
    """Variables of every part: no network, and memory of GPUs as the launcher sets it. A rehearsal sees no
    GPU."""
    env = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if rehearse:
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return env


def missing_packages(part: Part) -> list[str]:
    return [name for name in part.needs if find_spec(name) is None]


def default_path(about: Mapping[str, Any]) -> Path:
    """Where the table goes: a rehearsal's beside its logs, for it says nothing of a GPU."""
    if about["kind"] == "rehearsal":
        return WORK / "rehearsal.json"
    gpu = re.sub(r"[^a-z0-9]+", "-", about["device"].lower().removeprefix("nvidia ")).strip("-")
    ablation = "-ablation" if about["kind"] == "ablation" else ""
    return ROOT / "benchmarks" / "results" / f"{about['date']}-{gpu}{ablation}.json"


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _end(number: int, frame: Any) -> NoReturn:
    raise Ended(f"ended by {signal.Signals(number).name}")


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Part], list[Part]]:
    """The options, the chosen parts and all."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="time for everything (9.5); what does not fit is left out"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone, by name")
    parser.add_argument("--ablate", action="store_true", help="one key changed at a time, instead of the parts")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with gloo, at tiny size")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table; default: benchmarks/results/")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    options = parser.parse_args(argv)
    known = ablations() if options.ablate else parts()
    if options.rehearse:
        known = [rehearsed(part) for part in known]
    names = [part.name for part in known]
    if unknown := sorted(set(options.only or ()) - set(names)):
        parser.error(f"--only: no part {', '.join(unknown)}; there are: {', '.join(names)}")
    chosen = [part for part in known if options.only is None or part.name in (FACTS, *options.only)]
    return options, chosen, known


def main(argv: Sequence[str] | None = None) -> int:
    options, chosen, known = parse(argv)
    if options.list:
        for part in chosen:
            print(f"{part.name:<30} about {part.typical_s:.0f} s, at most {part.limit_s:.0f}: {part.about}")
        return 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    return Run(chosen, known, options).all()


if __name__ == "__main__":
    sys.exit(main())
