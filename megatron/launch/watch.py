"""Runs one process per rank to its end: shows rank 0's output, logs every rank, ends all if one fails."""

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Protocol

from megatron.launch.ranks import FATAL, STACK, TAIL_BYTES, Rank, start_rank
from megatron.launch.spares import SpareRanks
from megatron.process import STACKS_SIGNAL, LogFile, say, take_early_signals

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
GRACE_S = 5.0  # from SIGTERM to SIGKILL
RESTART_GRACE_S = 1.0  # the same, if the run starts again: the ranks wait for one that is gone
POLL_S = 0.1
# A rank that prints a traceback and is still alive after this long has handled it.
TRACEBACK_S = 5.0
STOPPED_S = 8.0  # a rank may be stopped (SIGSTOP) this long while the launcher runs
SUSPENDED_S = 5.0  # a longer pause between two looks means that the launcher was stopped too
STARTING_S = 30.0  # USR1 is held back this long until ranks handle it; Python may come from a slow file system
PYTHON_S = 5.0  # Ctrl-C is held back this long, not longer: a script without handlers shall get it too
STACKS_S = 2.0  # for the ranks to write their stacks
PEER_S = 1.5  # for another machine to report that its rank failed first
TAIL_LINES = 90  # of the failed rank's output: its traceback shall be within the last 100 lines of ours
# Signals by which a process ends itself, perhaps because a peer is gone. Any other signal came from outside.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    code: 0, or the exit code of the rank that failed first.
    reason: which rank failed and how, in words.
    repeatable: whether the same command may succeed if started again. False after a signal from outside, and
        after a refusal (a rank ended with code 1 and an error message without a traceback).
    """

    code: int
    reason: str = ""
    repeatable: bool = False
    log: str = ""  # path of the failed rank's log
    signal: int = 0  # one that was passed on to ranks, on this machine or another; 0: none


@dataclass(frozen=True)
class Attempt:
    """One start of a run's ranks.

    number: of restarts so far. cause: why the ranks were started again, in words.
    may_restart: whether the run starts again after a repeatable failure.
    silent: whether only failures are shown.
    spares: processes that may become ranks; None: every rank is a new process.
    """

    number: int = 0
    cause: str = ""
    may_restart: bool = False
    silent: bool = False
    spares: SpareRanks | None = None


FIRST_START = Attempt()


class PeerLaunchers(Protocol):
    """The launchers of the same run on other machines; `LauncherRendezvous` implements this."""

    def signals(self) -> list[int]:
        """Returns new signals for all ranks, in order of arrival."""
        ...

    def outcome(self) -> Outcome | None:
        """Returns the run's outcome: success once all machines report it, or the first failure; None while it
        runs."""
        ...

    def report(self, outcome: Outcome) -> None:
        """Reports the outcome of this machine's ranks to the other machines."""
        ...


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Yields a list to which each SIGTERM, SIGINT and SIGUSR1 is appended that arrives while the block runs.

    If SIGUSR1 arrived before the block, the list begins with SIGUSR1.
    """
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, remember) for number in PASSED_ON}
    received += take_early_signals(previous[signal.SIGUSR1])
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def watch_ranks(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    log_dir: Path,
    peers: PeerLaunchers | None = None,
    attempt: Attempt = FIRST_START,
) -> Outcome:
    """Runs `command` once per environment, each with its RANK, and returns the outcome.

    Rank 0's output goes to this process's stdout as it comes; every rank's output goes to
    `log_dir/rank_<r>.log`. If a rank fails, all ranks and their children are ended, and the traceback of the
    failed rank is shown last. If that rank was killed, stopped or hung, the stacks of all ranks are shown
    first. A rank killed by signal N counts as exit code 128 + N.

    SIGTERM, SIGINT and SIGUSR1 are passed on to every rank.

    peers: the launchers of other machines; the run then ends when it has ended on every machine.
    attempt: how this start of the ranks differs from others. If it may be followed by a restart, stdout gets
        one line with the failed rank and its log, and no traceback, because the run continues.
    """
    spares = attempt.spares
    ranks: list[Rank] = []
    complain = cache(lambda text: say(f"deepy.py: warning: {text}"))  # once: all logs are on one disk

    def renew() -> None:
        if spares is not None and attempt.may_restart:
            spares.renew(command, environments, ranks)

    with record_signals() as received:
        try:
            for env in environments:
                log = LogFile(log_dir / f"rank_{env['RANK']}.log", complain)
                spare = spares.take(command, env, log) if spares is not None else None
                ranks.append(spare or start_rank(int(env["RANK"]), int(env["WORLD_SIZE"]), command, env, log))
            if spares is not None and not attempt.may_restart:
                spares.close()
            outcome = _watch(ranks, received, _Screen(attempt.may_restart, attempt.silent), peers, renew)
            return replace(outcome, signal=received[0]) if received else outcome
        finally:
            _end(ranks)
            for rank in ranks:
                rank.close()


class _Screen:
    """Writes the output of rank 0 to stdout. The run continues if stdout is closed or its disk is full.

    quiet: whether to hide a failure after which the run is started again. silent: whether to show only the
    last output of a run that fails.
    """

    def __init__(self, quiet: bool, silent: bool) -> None:
        self.quiet, self._silent = quiet, silent
        with suppress(OSError):
            sys.stdout.flush()
        self._descriptor = sys.stdout.fileno()

    def show_running(self, rank: Rank, has_ended: bool = False) -> None:
        """Writes the output of a rank that has not failed."""
        if self._silent:
            rank.held = b"" if has_ended else rank.held[-TAIL_BYTES:]
        else:
            self.show(rank)

    def show(self, rank: Rank) -> None:
        """Writes the output of rank 0 that was read but not shown yet. For any other rank, writes nothing."""
        data, rank.held = rank.held, b""
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BlockingIOError:  # stdout is a non-blocking pipe, and full
            rank.held = data
        except OSError:
            pass

    def show_until_traceback(self, rank: Rank) -> None:
        """Writes the output of `rank` not shown yet, up to the first traceback or stack, and drops the
        rest."""
        end = min((place for mark in (*FATAL, STACK) if (place := rank.held.find(mark)) >= 0), default=len(rank.held))
        rank.held = rank.held[: rank.held.rfind(b"\n", 0, end) + 1]
        self.show(rank)


def _watch(
    ranks: list[Rank],
    received: list[int],
    screen: _Screen,
    peers: PeerLaunchers | None,
    renew_spares: Callable[[], None],
) -> Outcome:
    """Forwards output and signals until all ranks have ended, one has failed, or one is stopped. Returns the
    outcome.

    received: list of signals, which a handler extends as they arrive.
    peers: the launchers of other machines, if there are any.
    renew_spares: called often; starts spares once ranks have taken a step.
    """
    passed_on, last_look, reported_done = 0, time.monotonic(), False
    start = last_look
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.output, selectors.EVENT_READ, rank)
        while True:
            if peers is not None:
                received += peers.signals()
            while passed_on < len(received) and not _too_early(ranks, received[passed_on], start):
                number = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
                say(f"deepy.py: {_signal_name(received[passed_on])}: passed on to {number}")
                for rank in ranks:
                    rank.signal(received[passed_on])
                passed_on += 1
            # Exit codes first, output second: then nothing an ended rank wrote is missed.
            codes = [rank.process.poll() for rank in ranks]
            for key, _ in selector.select(POLL_S if None in codes else 0):
                if not key.data.read():  # closed
                    selector.unregister(key.fd)
            failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
            if failed:
                culprit = _first_failed(ranks, failed[0])
                cause = _earlier(culprit, peers)
                if cause is not None:
                    return _end_as(cause, ranks, screen)
                return _report_to(peers, _report_failure(culprit, ranks, screen, received))
            if None not in codes:
                for rank in ranks:
                    rank.read_all()
                screen.show_running(ranks[0], has_ended=True)
                if peers is None:
                    return Outcome(0)
                if not reported_done:
                    peers.report(Outcome(0, signal=received[0] if received else 0))
                    reported_done = True
                time.sleep(POLL_S)
            result = peers.outcome() if peers is not None else None
            if result is not None:
                return _end_as(result, ranks, screen)
            renew_spares()
            last_look, last = time.monotonic(), last_look
            if last_look - last > SUSPENDED_S:
                for rank in ranks:
                    rank.stopped_at = None
            for rank in ranks:
                if rank.stopped_for() > STOPPED_S:
                    return _report_to(peers, _report_stopped(rank, ranks, screen, bool(received)))
            suspect = _suspect(ranks)
            # Held back otherwise: rank 0 may be printing a traceback that another rank's failure caused
            if suspect is None or (suspect.index == 0 and not screen.quiet):
                screen.show_running(ranks[0])


def _earlier(culprit: Rank, peers: PeerLaunchers | None) -> Outcome | None:
    """Returns the failure on another machine that made `culprit`, a rank of this machine, fail; None if there
    is none.

    Waits up to PEER_S seconds for the other machines to report.
    """
    if peers is None or not culprit.traceback_at:
        return None
    deadline = time.monotonic() + PEER_S
    while (result := peers.outcome()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return result


def _report_to(peers: PeerLaunchers | None, outcome: Outcome) -> Outcome:
    """Reports an outcome to the other machines, if there are any, and returns it."""
    if peers is not None:
        peers.report(outcome)
    return outcome


def _end_as(outcome: Outcome, ranks: list[Rank], screen: _Screen) -> Outcome:
    """Ends this machine's ranks because the run has ended, shows the outcome of the run, and returns it."""
    will_restart = screen.quiet and outcome.repeatable
    _end(ranks, grace_s=RESTART_GRACE_S if will_restart else GRACE_S)
    if will_restart:
        screen.show_until_traceback(ranks[0])
        say(f"deepy.py: {outcome.reason}; its output is in {outcome.log} on that machine")
        return outcome
    screen.show(ranks[0])
    if outcome.code:
        say(
            f"deepy.py: error: {outcome.reason}"
            + (f"; its output is in {outcome.log} on that machine" if outcome.log else "")
        )
    return outcome


def _too_early(ranks: list[Rank], number: int, start: float) -> bool:
    """Returns whether to hold the signal `number` back because a rank has no handler for it yet.

    USR1 asks for a checkpoint, but would end a rank that is still starting. Ctrl-C would make Python print a
    traceback if `begin_process` has not set a handler yet. start: the time at which the ranks were started.
    """
    patience = {signal.SIGUSR1: STARTING_S, signal.SIGINT: PYTHON_S}.get(signal.Signals(number), 0.0)
    return time.monotonic() - start < patience and any(rank.would_die(signal.SIGUSR1) for rank in ranks)


def _suspect(ranks: list[Rank]) -> Rank | None:
    """Returns the rank whose traceback came first; None if there is none.

    A rank that still runs TRACEBACK_S seconds after its traceback does not count, because it has handled the
    exception.
    """
    now = time.monotonic()
    fresh = [
        rank
        for rank in ranks
        if rank.traceback_at and (rank.process.returncode or now - rank.traceback_at < TRACEBACK_S)
    ]
    return min(fresh, key=lambda rank: rank.traceback_at or now, default=None)


def _first_failed(ranks: list[Rank], failed: Rank) -> Rank:
    """Returns the rank to blame for a failure. It is the first of these that exists:

    - a rank killed by a signal from outside,
    - a rank that ended with code 1 and without a traceback (it refused to run),
    - the first rank that printed a traceback, if it has failed,
    - the rank `failed`.
    """
    suspect = _suspect(ranks)
    if suspect is not None and _killed(ranks) is None:
        deadline = time.monotonic() + GRACE_S
        while suspect.process.poll() is None and time.monotonic() < deadline:
            suspect.read()
            time.sleep(0.02)
    for rank in ranks:
        rank.read_all()
    exited = (rank for rank in ranks if rank.process.poll() == 1)
    refused = next((rank for rank in exited if not rank.traceback_at and not rank.is_overdue()), None)
    return _killed(ranks) or refused or (suspect if suspect is not None and suspect.process.poll() else failed)


def _killed(ranks: list[Rank]) -> Rank | None:
    """Returns a rank that a signal from outside has ended; None if there is none."""
    return next((rank for rank in ranks if rank.ending_signal() not in (0, *CRASHES)), None)


def _report_failure(culprit: Rank, ranks: list[Rank], screen: _Screen, asked_for: Sequence[int]) -> Outcome:
    """Ends every rank, shows why `culprit` failed, and returns the outcome.

    asked_for: signals that were passed on to the ranks.
    """
    culprit.read_all()
    code = culprit.process.poll() or 1
    # The signal ended the rank before it had a handler, or was a second signal
    if culprit.ending_signal() in asked_for:
        _end(ranks)
        screen.show(ranks[0])
        name = _signal_name(culprit.ending_signal())
        say(f"deepy.py: {name} ended the run")
        return Outcome(128 + culprit.ending_signal(), f"{name} from outside")
    cause = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if code == -signal.SIGBUS:
        cause += " (a mapped file, such as the data's .bin, became shorter while it was read, or /dev/shm is full)"
    if culprit.is_overdue():
        cause = "made no progress in time (limits: collective_timeout_s, first_step_timeout_mins)"
    reason = f"rank {culprit.index} of {culprit.world_size} {cause}"
    refused = code == 1 and culprit.traceback_at is None and not culprit.is_overdue()
    outcome = Outcome(
        128 - code if code < 0 else code, reason, not refused and not asked_for, str(culprit.log.path.resolve())
    )
    _end_run(culprit, outcome, ranks, screen, with_stacks=code < 0 or culprit.is_overdue())
    return outcome


def _report_stopped(culprit: Rank, ranks: list[Rank], screen: _Screen, stop_requested: bool) -> Outcome:
    """Ends every rank because `culprit` was stopped (SIGSTOP) and the others wait for it. Returns the
    outcome."""
    reason = (
        f"rank {culprit.index} of {culprit.world_size} was stopped (SIGSTOP) and did not continue for {STOPPED_S:.0f} s"
    )
    outcome = Outcome(128 + signal.SIGSTOP, reason, not stop_requested, str(culprit.log.path.resolve()))
    _end_run(culprit, outcome, ranks, screen, with_stacks=True, is_stopped=True)
    return outcome


def _end_run(
    culprit: Rank, outcome: Outcome, ranks: list[Rank], screen: _Screen, with_stacks: bool, is_stopped: bool = False
) -> None:
    """Ends every rank and shows why. If the run is started again, shows only one line that names the log.

    with_stacks: whether all ranks write their stacks first.
    is_stopped: whether `culprit` is stopped (SIGSTOP), so that SIGTERM would not end it.
    """
    if screen.quiet and outcome.repeatable and culprit.log.is_complete:
        ranks[0].read_all()
        screen.show_until_traceback(ranks[0])
        say(f"deepy.py: {outcome.reason}; its output is in {outcome.log}")
        if with_stacks:
            _write_stacks(ranks)
        _end(ranks, politely=not is_stopped, grace_s=RESTART_GRACE_S)
        return
    if with_stacks:
        _show_stacks(culprit, ranks, screen)
    elif culprit.index == 0:
        screen.show(culprit)
    _end(ranks, politely=not is_stopped)
    screen.show(ranks[0])
    ending = "its output is above"
    if is_stopped:
        ending = "its stack is above"
    elif culprit.index:
        ending = f"{culprit.log.path} ends with:\n{culprit.last_lines(TAIL_LINES)}"
    say(f"deepy.py: error: {outcome.reason}; {ending}")


def _show_stacks(culprit: Rank, ranks: list[Rank], screen: _Screen) -> None:
    """Shows the stack of every rank, or its last output. The stack of `culprit` comes last.

    A culprit that has already ended is left out, because `_report_failure` shows its output.
    """
    had_ended = culprit.process.poll() is not None
    _write_stacks(ranks)
    for rank in sorted(ranks, key=lambda rank: rank is culprit):
        rank.read_all()
        if rank is culprit and had_ended:
            continue
        if rank.index == 0:
            say(f"stack of rank 0 of {rank.world_size}:" + ("" if rank.held else " see its output above"))
            screen.show(rank)
        else:
            say(f"stack of rank {rank.index} of {rank.world_size} ({rank.log.path}):\n{rank.last_lines(TAIL_LINES)}")


def _write_stacks(ranks: list[Rank]) -> None:
    """Makes every rank write its stack to its output, and waits up to STACKS_S seconds for the stacks to
    reach the logs."""
    counts = {rank.index: rank.tail.count(STACK) for rank in ranks}
    for rank in ranks:
        rank.signal(STACKS_SIGNAL)
        rank.signal(signal.SIGCONT)  # a stopped rank shows its stack when it continues
    deadline = time.monotonic() + STACKS_S
    running = [rank for rank in ranks if rank.process.poll() is None]
    while time.monotonic() < deadline and any(
        rank.process.poll() is None and rank.tail.count(STACK) == counts[rank.index] for rank in running
    ):
        time.sleep(0.05)
        for rank in ranks:
            rank.read_all()
    time.sleep(0.2)  # for the rest of a stack that has begun


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(ranks: list[Rank], politely: bool = True, grace_s: float = GRACE_S) -> None:
    """Kills each rank with its child processes, such as data-loader workers.

    politely: whether to send SIGTERM first and wait up to `grace_s` seconds.
    """
    alive = [rank for rank in ranks if politely and rank.process.poll() is None]
    for rank in alive:
        rank.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        for rank in alive:
            rank.read()  # a rank that cannot write cannot end
        alive = [rank for rank in alive if rank.process.poll() is None]
        time.sleep(0.02)
    for rank in ranks:
        rank.signal_group(signal.SIGKILL)
        rank.process.wait()
        rank.read_all()
