"""The commands of stages as processes: their output in a log, signals passed on, none left behind."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.launch import install_root
from megatron.launch.ranks import die_with_parent
from megatron.pipelines.errors import STOPPED, StageFailed

_LOOKS_S = 0.2
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

    def run(self, what: str, command: Sequence[str], log: Path, with_children: bool = False) -> int:
        """Run a command to its end, its output at the end of `log`; its exit code.

        with_children: a signal goes to what the command has started too: deepy.py tells its ranks itself.
        what: how messages call it. Raises StageFailed where this process was told to stop before it began,
        and where it cannot be started."""
        self._with_children = with_children
        if self.stopped is not None:
            raise StageFailed(f"{what}: told to stop (signal {self.stopped})", self.exit_code)
        log.parent.mkdir(parents=True, exist_ok=True)
        python = os.path.dirname(sys.executable)
        env = {
            **os.environ, "NEOX": str(install_root()), "PATH": f"{python}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        with log.open("ab") as output:
            output.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
            output.flush()
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
        code, self._current = self._current.returncode, None
        return code
