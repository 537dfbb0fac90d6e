"""The commands of stages as processes: their output in a log, signals passed on, none left behind."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megatron.launch import install_root
from megatron.launch.ranks import die_with_parent
from megatron.pipelines.errors import STOPPED, StageFailed, cannot_write
from megatron.process.children import children

_LOOKS_S = 0.2
_ENDS_S = 5.0  # for what a command has left behind to end when it is told to
_GET_SUBREAPER, _SET_SUBREAPER = 37, 36  # of prctl(2)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Processes:
    """Runs one command after the other. While one runs, a signal that asks this process to end or to save is
    passed on to it; the pipeline ends when it has."""

    def __init__(self, folder: Path, lock: IO[str], beat: Callable[[], None]) -> None:
        """folder: where commands work. lock: stays held until all of them have ended. beat: called a few
        times a second."""
        self._folder, self._lock, self._beat = folder, lock, beat
        self._current: subprocess.Popen[bytes] | None = None
        self._with_children = False
        self.stopped: int | None = None

    @contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """Within, SIGTERM, SIGINT and SIGUSR1 go to the command that runs, and no further one begins."""
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            with _orphans_come_here():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """Of a pipeline that was told to stop: 124 by USR1, a scheduler's notice, else as a shell has it."""
        return STOPPED if self.stopped in (None, signal.SIGUSR1) else 128 + self.stopped

    def _pass_on(self, number: int, frame: Any) -> None:
        self.stopped = number
        if self._current is None:
            raise StageFailed(f"told to stop (signal {number})", self.exit_code)  # as a download goes on
        if self._current.poll() is None and self._with_children:
            os.killpg(self._current.pid, number)
        elif self._current.poll() is None:
            self._current.send_signal(number)

    def run(
        self, what: str, command: Sequence[str], log: Path, say: Callable[[str], None], with_children: bool = False
    ) -> int:
        """Run a command to its end, its output at the end of `log`; its exit code. What it has started ends
        with it: else it would hold the lock, and write into what the next command reads.

        with_children: a signal goes to what the command has started too: deepy.py tells its ranks itself.
        what: how messages call it. say: is told what was left behind. Raises StageFailed where this process
        was told to stop before it began, where it cannot be started, and where its log cannot be written."""
        self._with_children = with_children
        if self.stopped is not None:
            raise StageFailed(f"{what}: told to stop (signal {self.stopped})", self.exit_code)
        python = os.path.dirname(sys.executable)
        env = {
            **os.environ, "NEOX": str(install_root()), "PATH": f"{python}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        ours = children(os.getpid())
        with _opened(log, f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n") as output:
            try:
                self._current = subprocess.Popen(
                    command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
                    pass_fds=(self._lock.fileno(),), preexec_fn=die_with_parent(signal.SIGTERM),
                    process_group=0,  # a Ctrl-C reaches it once, from here
                )  # fmt: skip
            except OSError as problem:
                raise StageFailed(f"{what}: {command[0]} cannot be started ({problem.strerror})") from None
        while self._current.poll() is None:
            self._beat()
            time.sleep(_LOOKS_S)
        if left := _end_others(ours):
            say(f"warning: ended what the command had left behind: {', '.join(left)}")
        code, self._current = self._current.returncode, None
        return code


def _opened(log: Path, line: str) -> IO[bytes]:
    """A log to add to, with a line added. Raises PipelineError."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab", buffering=0)
        try:
            output.write(line.encode())
        except OSError:
            output.close()
            raise
    except OSError as problem:
        raise cannot_write(log, problem) from None
    return output


@contextmanager
def _orphans_come_here() -> Iterator[None]:
    """Within, processes whose parent has ended become children of this one, whatever session they made for
    themselves (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        yield
        return
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


def _end_others(kept: Set[int]) -> list[str]:
    """End all children of this process but `kept`, and theirs, which become ours: first asked to, then by
    force. `NAME (PID)` of each that was there."""
    found: dict[int, str] = {}
    for number, patience_s in ((signal.SIGTERM, _ENDS_S), (signal.SIGKILL, _ENDS_S)):
        told, until = set[int](), time.monotonic() + patience_s
        while left := children(os.getpid()) - kept:
            for pid in left:
                with suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == pid:  # it has ended, and nobody had asked
                        continue
                found.setdefault(pid, f"{_name(pid)} ({pid})")
                if pid not in told:
                    told.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() > until:
                break
            time.sleep(0.02)
    return list(found.values())


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "a process"
