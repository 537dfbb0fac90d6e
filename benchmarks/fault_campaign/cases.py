"""Draws the cases of a campaign, breaks a run as a case says, starts it again, and judges the result."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from benchmarks.fault_campaign.faults import (
    BEFORE_ALL_HAVE_READ,
    BEFORE_FINGERPRINTS,
    BEFORE_SAVE_IS_LOCKED,
    DAMAGES,
    FAULTS,
    PHASES,
    PHASES_OF_COMMANDS,
    RESTARTED_FAULTS,
    SECOND_ENDED,
    TRAINING_FAULTS,
    VALID_CONFIGURATION,
    Injection,
    damage,
    install,
)
from benchmarks.fault_campaign.processes import HANG_S, Ending, refusal_in, run_ranks
from benchmarks.fault_campaign.runs import (
    COMMAND,
    COMMANDS,
    LAYOUTS,
    LOCK,
    OBJECTIVE_NAMES,
    STEPS,
    CommandRun,
    TrainingRun,
    rewind,
    run_of,
)
from tests.disks import mount, remount

NO_PHASE = "between two starts"
"""The phase of damages in the ledger, which happen while the run does not run."""
ROOT = Path(__file__).resolve().parents[2]
Verdict = Literal["equal", "refused", "missed", "wrong"]
"""equal: the run went on to the same bits.

refused: it said in one line what is wrong, and went on to the same bits once that was mended.

missed: the fault's place was never reached. wrong: anything else."""
_DISK_FAULTS = ("disk full", "disk read-only")
_GIVES_UP_VALIDATION = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR1 twice", "NaN")
_CRASHES = ("connections lost", "no descriptors left", "memory limit")  # as if killed: a traceback may tell
_UNREADABLE, _CHANGED, _SECOND_RUN = TRAINING_FAULTS[1:]
_DISK_KB = 128 * 1024
_SHARE_OF_DAMAGES, _SHARE_OF_COMMANDS, _SHARE_OF_RESTARTS = 0.25, 0.12, 0.1


@dataclass(frozen=True)
class Case:
    """A fault in a run.

    start: the checkpoint with which the run begins; 0: none. injection: a fault inside a rank, or None.
    damage: one of DAMAGES, done to the files of the run before it starts from `start`, or None.
    restarts: 0: the campaign starts the run again; else deepy.py may do so, that many times.
    """

    seed: int
    index: int
    layout: str
    objective: str
    start: int
    injection: Injection | None
    damage: str | None
    restarts: int = 0

    @property
    def fault(self) -> str:
        """Returns the name of the fault."""
        return self.injection.fault if self.injection is not None else str(self.damage)


@dataclass(frozen=True)
class Outcome:
    """The verdict of a case. detail: the refusal, or what went wrong."""

    verdict: Verdict
    detail: str
    seconds: float


def draw(seed: int, index: int) -> Case:
    """Returns the case with this index in the campaign of this seed."""
    choice = random.Random(f"{seed} {index}")
    rank_faults = [name for name in FAULTS if name != "SIGSTOP"]
    command_faults = [name for name in rank_faults if name not in TRAINING_FAULTS]
    kind = choice.random()
    if kind < _SHARE_OF_RESTARTS:
        layout = choice.choice([name for name in LAYOUTS if not name.startswith("deepspeed")])
        phase, fault = choice.choice(list(PHASES)), choice.choice(RESTARTED_FAULTS)
        injection = Injection(
            fault,
            phase,
            choice.randint(1, PHASES[phase][1]),
            choice.random() < 0.5,
            choice.randrange(LAYOUTS[layout][0]),
        )
        return Case(seed, index, layout, choice.choice(OBJECTIVE_NAMES), 0, injection, None, restarts=2)
    if kind < _SHARE_OF_RESTARTS + _SHARE_OF_COMMANDS:
        command, fault = choice.choice(list(COMMANDS)), choice.choice(command_faults)
        phase, num_calls = choice.choice(list(PHASES_OF_COMMANDS[command].items()))
        injection = Injection(fault, phase, choice.randint(1, num_calls), choice.random() < 0.5, 0)
        return Case(seed, index, COMMAND, command, 0, injection, None)
    layout, objective = choice.choice(list(LAYOUTS)), choice.choice(OBJECTIVE_NAMES)
    start = choice.choice((0, 2, 4))
    if choice.random() < _SHARE_OF_DAMAGES:
        return Case(seed, index, layout, objective, start or 2, None, choice.choice(DAMAGES))
    fault = choice.choice(rank_faults)
    phase = choice.choice([name for name in PHASES if fault != _CHANGED or name not in BEFORE_FINGERPRINTS])
    num_calls = max(1, PHASES[phase][1] * (STEPS - start) // STEPS)
    injection = Injection(
        fault, phase, choice.randint(1, num_calls), choice.random() < 0.5, choice.randrange(LAYOUTS[layout][0])
    )
    return Case(seed, index, layout, objective, start, injection, None)


class References:
    """Finished runs that nothing happened to, one per layout and objective, and their results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[tuple[str, str], dict[str, Any]] = {}

    def folder(self, layout: str, objective: str) -> Path:
        """Returns the folder of a finished run; trains it if it is not there."""
        folder = self._folder / f"{layout}_{objective}"
        if (layout, objective) not in self._results:
            run = run_of(layout, objective)
            if layout == COMMAND:
                shutil.copytree(self.folder("plain", "pretraining"), folder)
            run.prepare(folder)
            with run.surroundings():
                ending = run_ranks(run, folder, lambda rank: None)
            if not ending.succeeded:
                raise RuntimeError(f"{layout} {objective} fails without a fault:\n" + "\n".join(ending.outputs)[-3000:])
            self._results[layout, objective] = run.result(folder)
        return folder

    def result(self, layout: str, objective: str) -> dict[str, Any]:
        """Returns the result of a finished run."""
        return self._results[layout, objective]


def judge(case: Case, references: References, folder: Path | None = None) -> Outcome:
    """Runs a case in a process of its own and returns its outcome. folder: a new folder that stays; None: a
    temporary one."""
    original = references.folder(case.layout, case.objective)
    expected = references.result(case.layout, case.objective)
    start = time.monotonic()
    place = folder or Path(tempfile.mkdtemp(prefix="neox_fault_"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        answer = place / "outcome.json"
        pid = os.fork()
        if pid == 0:
            _answer(case, original, expected, place / "case", answer)
        os.waitpid(pid, 0)
        if not answer.exists():
            raise RuntimeError(f"case {case.index} of seed {case.seed} was not judged; see the traceback above")
        verdict, detail = json.loads(answer.read_text())
        return Outcome(verdict, detail, time.monotonic() - start)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


def _answer(case: Case, original: Path, expected: dict[str, Any], folder: Path, answer: Path) -> NoReturn:
    """Judges a case and writes the verdict to a file, in a forked process, which it ends."""
    try:
        run = run_of(case.layout, case.objective)
        with run.surroundings():
            answer.write_text(json.dumps(_judge(case, run, original, expected, folder)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)


def _judge(
    case: Case, run: TrainingRun | CommandRun, original: Path, expected: dict[str, Any], folder: Path
) -> tuple[Verdict, str]:
    folder.mkdir()
    if case.fault in _DISK_FAULTS:
        mount(folder, _DISK_KB, read_only=False)
    shutil.copytree(original, folder, dirs_exist_ok=True, symlinks=True)
    choice = random.Random(f"{case.seed} {case.index} damage")
    if isinstance(run, CommandRun):
        run.rewind(folder)
    else:
        rewind(folder, case.start)
        if choice.random() < 1 / 3:  # the reference saves in the background
            with (folder / "run.yml").open("a") as file:
                file.write("async_save: false\n")
        if choice.random() < 1 / 3:
            with (folder / "run.yml").open("a") as file:
                file.write("local_save: local\nlocal_save_interval: 1\n")
    if case.injection is None:
        return _judge_damage(case, run, folder, expected, original, choice)
    if case.restarts:
        return _judge_restart(case, run, folder, expected)
    second_endings: list[Ending] = []
    is_locked = False

    def start_second_run() -> None:
        nonlocal is_locked
        if case.fault == _SECOND_RUN and (folder / "reached").exists() and not second_endings:
            is_locked = (folder / "run" / LOCK).exists()
            second_endings.append(run_ranks(run, folder, lambda rank: None, "second_output"))
            (folder / SECOND_ENDED).touch()

    attempt = run_ranks(run, folder, partial(_break, case.injection, folder), meanwhile=start_second_run)
    if not (folder / "reached").exists():
        return ("missed", "") if attempt.succeeded else ("wrong", _summary("failed without its fault", attempt))
    if problem := _misbehaviour(attempt, case.fault):
        return "wrong", problem
    if problem := _problem_during_fault(case.injection, run, folder, expected, attempt, second_endings, is_locked):
        return "wrong", problem
    _mend(case.fault, folder, original)
    resumed = run_ranks(run, folder, lambda rank: None)
    if not resumed.succeeded:
        return "wrong", _summary("did not go on", resumed)
    if difference := _difference(expected, run.result(folder), without_values=case.fault in _GIVES_UP_VALIDATION):
        return "wrong", difference
    if case.fault in (_UNREADABLE, _CHANGED) and attempt.refusal is not None:
        return "refused", attempt.refusal
    return "equal", attempt.refusal or "".join(ending.refusal or "" for ending in second_endings)


def _problem_during_fault(
    injection: Injection,
    run: TrainingRun | CommandRun,
    folder: Path,
    expected: dict[str, Any],
    attempt: Ending,
    second_endings: Sequence[Ending],
    is_locked: bool,
) -> str | None:
    """Returns what a run did wrong while its files were changed, or while it was started twice; None if
    nothing.

    A configuration that was read counts no more. Changed data are named, or were never read. Of two runs on
    one `save` the second is refused and the first not disturbed; until the first has locked `save`, either.
    """
    refusal = attempt.refusal or ""
    if injection.fault == _UNREADABLE and not attempt.succeeded:
        if injection.phase not in BEFORE_ALL_HAVE_READ:
            return _summary("needs its configuration again", attempt)
        return None if "run.yml" in refusal else _summary("does not name run.yml", attempt)
    if injection.fault == _CHANGED:
        path = (folder / "changed").read_text()
        if not attempt.succeeded:
            return None if path in refusal else _summary(f"does not name {path}", attempt)
        difference = _difference(expected, run.result(folder))
        return f"went on with a changed {path}: {difference}" if difference else None
    for second_ending in second_endings:
        if "another run is writing there" in (second_ending.refusal or ""):
            return None if attempt.succeeded else _summary("was disturbed by a second run", attempt)
        if is_locked or injection.phase not in BEFORE_SAVE_IS_LOCKED or _misbehaviour(second_ending, injection.fault):
            return _summary("the second run was not refused", second_ending)
    return None


def _judge_restart(
    case: Case, run: TrainingRun | CommandRun, folder: Path, expected: dict[str, Any]
) -> tuple[Verdict, str]:
    """Starts the run once, through deepy.py, which has to bring it to its end."""
    words = ["--num_gpus", str(run.ranks), "--max-restarts", str(case.restarts)]
    command = [
        sys.executable,
        str(ROOT / "deepy.py"),
        *words,
        str(Path(__file__).with_name("faulty_train.py")),
        "run.yml",
    ]
    env = {**os.environ, "NEOX_FAULT": json.dumps(asdict(case.injection)), "PYTHONPATH": str(ROOT)}  # type: ignore[arg-type]
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=3 * HANG_S)
    except subprocess.TimeoutExpired as hang:
        return "wrong", f"hung: {(hang.stdout or b'')[-500:]!r}"
    refusal = refusal_in(done.stdout + done.stderr)
    if done.returncode == 1 and refusal is not None:  # which deepy.py does not repeat
        resumed = run_ranks(run, folder, lambda rank: None)
        difference = _difference(expected, run.result(folder)) if resumed.succeeded else _summary("failed", resumed)
        return ("wrong", difference) if difference else ("refused", refusal)
    if done.returncode != 0:
        return "wrong", f"code {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
    if not (folder / "reached").exists():
        return "missed", ""
    num_restarts = done.stdout.count("deepy.py: restart ") + done.stderr.count("deepy.py: restart ")
    if not num_restarts and case.fault in ("SIGKILL", "SIGSTOP"):
        return "wrong", "deepy.py did not start the run again"
    difference = _difference(expected, run.result(folder))
    return ("wrong", difference) if difference else ("equal", f"restarts: {num_restarts}")


def _judge_damage(
    case: Case,
    run: TrainingRun | CommandRun,
    folder: Path,
    expected: dict[str, Any],
    original: Path,
    choice: random.Random,
) -> tuple[Verdict, str]:
    """Damages a file and starts the run. If it refuses, mends the file and starts it again."""
    path = damage(str(case.damage), folder, choice)
    if path is None:
        return "missed", ""
    attempt = run_ranks(run, folder, lambda rank: None)
    if attempt.succeeded:
        if path == "run/logs/metrics.jsonl":  # rows of before are lost with it
            expected = {**expected, "metrics": [row for row in expected["metrics"] if row["iteration"] > case.start]}
        difference = _difference(expected, run.result(folder))
        return ("wrong", f"{path}: {difference}") if difference else ("equal", path)
    if problem := _misbehaviour(attempt, case.fault):
        return "wrong", f"{path}: {problem}"
    refusal = attempt.refusal or ""
    kind = str(case.damage).partition(":")[0]
    names = {Path(path).name, Path(path).stem} | ({Path(path).parent.name} if kind == "checkpoint" else set())
    # Of the configuration, or of data paths
    key = re.match(r"\S+: error: (?:\S+: )?[a-z_.]+: |.* \([a-z_]+, --", refusal) is not None
    if not any(name in refusal for name in names) and not (key and kind in ("configuration", "data")):
        return "wrong", f"{path}: the refusal names another file: {refusal}"
    if path.startswith("run/"):
        shutil.rmtree(folder / "run")
        shutil.copytree(original / "run", folder / "run")
        rewind(folder, case.start)
    else:
        shutil.copy(original / path, folder / path)
    resumed = run_ranks(run, folder, lambda rank: None)
    if not resumed.succeeded:
        return "wrong", _summary(f"{path}: did not go on once it was mended", resumed)
    difference = _difference(expected, run.result(folder))
    return ("wrong", f"{path}: {difference}") if difference else ("refused", refusal)


def _break(injection: Injection, folder: Path, rank: int) -> None:
    if rank == injection.rank:
        install(injection, folder)


def _mend(fault: str, folder: Path, original: Path) -> None:
    if fault == _UNREADABLE:
        os.replace(folder / VALID_CONFIGURATION, folder / "run.yml")
    if fault == _CHANGED:
        path = (folder / "changed").read_text()
        shutil.copy(original / path, folder / path)
    if fault == "disk read-only":
        with suppress(AssertionError):
            remount(folder, read_only=False)
    (folder / "fill").unlink(missing_ok=True)


def _misbehaviour(ending: Ending, fault: str) -> str | None:
    """Returns the problem with the end of a broken run; None if there is none.

    A run may not hang. If the ranks that ended first were not killed, one of them has to say in one clear
    line why, unless the fault may crash it.
    """
    if ending.hung:
        return _summary("hung", ending)
    codes = [ending.codes[rank] for rank in ending.ended_early]
    if not any(codes) or min(codes) < 0 or max(codes) > 128 or fault in _CRASHES:
        return None
    return None if ending.refusal else _summary("no clear line", ending)


def _summary(problem: str, ending: Ending) -> str:
    return f"{problem}: codes {ending.codes}: {ending.refusal or ending.traceback or ending.outputs[0][-300:]}"


def _difference(expected: dict[str, Any], result: dict[str, Any], without_values: bool = False) -> str | None:
    """Returns where two results differ; None if they are equal.

    without_values: whether a validation may lack its loss, and then all of it: a stopped run gives it up, and
        after NaN the other metrics mean nothing.
    """
    rows: dict[int, dict[str, Any]] = {}
    for row in result["metrics"]:  # a run stopped after its last step validates at its next start, in a further row
        merged_row = rows.setdefault(row["iteration"], {})
        repeated = [key for key in row if key in merged_row and key != "iteration"]
        if repeated:
            return f"iteration {row['iteration']} has {', '.join(repeated)} twice"
        merged_row.update(row)
    for row in expected["metrics"]:
        other_row = rows.get(row["iteration"], {})
        keys = [key for key in {**row, **other_row} if row.get(key) != other_row.get(key)]
        if without_values and other_row.get("validation/lm_loss") is None:
            keys = [key for key in keys if not key.startswith("validation/")]
        if keys:
            return f"iteration {row['iteration']}: " + ", ".join(
                f"{k} {row.get(k)} -> {other_row.get(k)}" for k in keys
            )
    files = [name for name in expected["tensors"] if expected["tensors"][name] != result["tensors"].get(name)]
    return f"tensors differ in {', '.join(files)}" if files else None


def ledger_row(case: Case, outcome: Outcome) -> dict[str, Any]:
    """Returns the line of a case in the ledger, which has all that `case_of` needs."""
    row = {key: value for key, value in asdict(case).items() if key not in ("injection", "damage")}
    place = {"phase": NO_PHASE, "fault": case.damage} if case.injection is None else asdict(case.injection)
    seconds = round(outcome.seconds, 1)
    detail = outcome.detail.replace(f"{ROOT}/", "")
    return {**row, **place, "verdict": outcome.verdict, "detail": detail, "seconds": seconds}


def case_of(row: Mapping[str, Any]) -> Case:
    """Returns the case of a line in the ledger, whatever `draw` returns for its index by now."""
    names = ("seed", "index", "layout", "objective", "start")
    values = {name: row[name] for name in names} | {"restarts": row.get("restarts", 0)}
    if row["phase"] == NO_PHASE:
        return Case(**values, injection=None, damage=row["fault"])
    injection = Injection(row["fault"], row["phase"], row["nth"], row["is_late"], row["rank"])
    return Case(**values, injection=injection, damage=None)
