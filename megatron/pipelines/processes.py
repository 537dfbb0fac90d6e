"""Runs the commands of stages as processes: logs their output, passes signals on, and ends their children."""

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
_ENDS_S = 5.0  # seconds between SIGTERM and SIGKILL for processes that a command has left behind
_GET_SUBREAPER, _SET_SUBREAPER = 37, 36  # options of prctl(2)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Processes:
    """Runs the commands of a pipeline, one after the other.

    SIGTERM, SIGINT and SIGUSR1 to the pipeline are passed on to the running command. After such a signal no
    other command is started.
    """

    def __init__(self, folder: Path, lock: IO[str], beat: Callable[[], None]) -> None:
        """Prepares to run commands in the folder `folder`; starts none.

        lock: the pipeline's open lock file. Commands inherit it, so the lock is held until all have ended.
        beat: called a few times a second while a command runs.
        """
        self._folder, self._lock, self._beat = folder, lock, beat
        self._current: subprocess.Popen[bytes] | None = None
        self._with_children = False
        self.stopped: int | None = None

    @contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """Within the block, passes SIGTERM, SIGINT and SIGUSR1 on to the running command.

        After such a signal no other command is started. At the end of the block the old handlers are
        restored."""
        handlers = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            with _orphans_come_here():
                yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """The exit code of a stopped pipeline: 124 after SIGUSR1 (a scheduler's time limit), else 128 +
        signal."""
        return STOPPED if self.stopped in (None, signal.SIGUSR1) else 128 + self.stopped

    def _pass_on(self, number: int, frame: Any) -> None:
        self.stopped = number
        if self._current is None:
            raise StageFailed(f"stopped by signal {number}", self.exit_code)  # for example during a download
        if self._current.poll() is None and self._with_children:
            os.killpg(self._current.pid, number)
        elif self._current.poll() is None:
            self._current.send_signal(number)

    def run(
        self, label: str, command: Sequence[str], log: Path, say: Callable[[str], None], with_children: bool = False
    ) -> int:
        """Runs a command to its end, appends its output to `log`, and returns its exit code.

        Processes that the command leaves behind are ended: they would hold the lock, and could write files
        that the next command reads.

        label: name of the stage, for messages.
        say: called with a warning that names the processes that were ended.
        with_children: send signals to the command's whole process group. deepy.py does not need this, because
            it signals its ranks itself.

        Raises StageFailed if a signal has stopped the pipeline, or the command cannot be started, and
        PipelineError if the log cannot be written.
        """
        self._with_children = with_children
        if self.stopped is not None:
            raise StageFailed(f"{label}: stopped by signal {self.stopped}", self.exit_code)
        python = os.path.dirname(sys.executable)
        env = {
            **os.environ, "NEOX": str(install_root()), "PATH": f"{python}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        own_children = children(os.getpid())
        with _opened(log, f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n") as output:
            try:
                self._current = subprocess.Popen(
                    command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
                    pass_fds=(self._lock.fileno(),), preexec_fn=die_with_parent(signal.SIGTERM),
                    process_group=0,  # the terminal's Ctrl-C reaches only this process, which passes it on
                )  # fmt: skip
            except OSError as problem:
                raise StageFailed(f"{label}: {command[0]} cannot be started ({problem.strerror})") from None
        while self._current.poll() is None:
            self._beat()
            time.sleep(_LOOKS_S)
        if left := _end_others(own_children):
            say(f"warning: ended processes that the command had left running: {', '.join(left)}")
        code, self._current = self._current.returncode, None
        return code


def _opened(log: Path, line: str) -> IO[bytes]:
    """Opens a log for appending, and writes `line` to it. Raises PipelineError if it cannot be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            file.write(line.encode())
        return log.open("ab", buffering=0)
    except OSError as problem:
        raise cannot_write(log, problem) from None


@contextmanager
def _orphans_come_here() -> Iterator[None]:
    """Within the block, makes this process the parent of its descendants whose own parent has ended.

    It uses prctl's PR_SET_CHILD_SUBREAPER. On other systems than Linux it does nothing."""
    if sys.platform != "linux":
        yield
        return
    libc, previous = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_GET_SUBREAPER, ctypes.byref(previous), 0, 0, 0)
    libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_SUBREAPER, previous.value, 0, 0, 0)


def _end_others(own_children: Set[int]) -> list[str]:
    """Ends all children of this process except `own_children`, with SIGTERM and 5 s later with SIGKILL.

    When a child ends, its own children become children of this process, and are ended too. Returns a text
    `NAME (PID)` for each ended process.
    """
    names: dict[int, str] = {}
    for number, patience_s in ((signal.SIGTERM, _ENDS_S), (signal.SIGKILL, _ENDS_S)):
        signalled, deadline = set[int](), time.monotonic() + patience_s
        while left := children(os.getpid()) - own_children:
            for pid in left:
                with suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == pid:  # it had ended already, and was a zombie
                        continue
                names.setdefault(pid, f"{_name(pid)} ({pid})")
                if pid not in signalled:
                    signalled.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    return list(names.values())


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "a process"
