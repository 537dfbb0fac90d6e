"""Keeps spares beside the ranks of a run with `max_restarts`: processes that make the run's next ranks.

A spare has imported everything that a rank imports, which takes most of a start. It holds no model and has no
connection to other ranks. It forks itself for each start, or becomes the rank where a fork would not work.
Its program is `megatron.process.spare`.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.launch.ranks import AdoptedProcess, Rank, adopt_orphans, open_output, start_rank
from megatron.process import LogFile, say
from megatron.process.spare import FORKS, IMPORTS
from megatron.process.terminal import OutputSplitter

# Nothing of megatron is imported before `sys.path` is the rank's: it may have its package from elsewhere.
_PROGRAM = (
    "import json, sys; report = json.load(open({imports!r})); sys.path[:] = report['path']; "
    "from megatron.process.spare import wait; wait({script!r}, sys.argv[1:], report, {orders})"
)
_FORK_S, _BURIAL_S = 10.0, 5.0


@dataclass
class _Spare:
    """A waiting process.

    environment: variables it was started with. orders: to this socket its ranks' variables are written.
    started_ns: time of its start, in ns since 1970. report: what it sent after its imports.
    """

    rank: Rank
    command: tuple[str, ...]
    environment: Mapping[str, str]
    orders: socket.socket
    started_ns: int
    report: bytes = b""

    def forks(self) -> bool:
        """Returns whether it has imported all and forks itself for each rank."""
        if not self.report:
            with suppress(BlockingIOError):
                self.report = self.orders.recv(1, socket.MSG_DONTWAIT)
        return self.report == FORKS

    def fork(self, order: bytes, log: LogFile) -> Rank:
        """Returns a rank that it forks. Raises OSError if it has ended or does not answer."""
        terminal, reader, writer = open_output(self.rank.index)
        go_reader, go_writer = os.pipe()
        try:
            self.orders.settimeout(_FORK_S)
            socket.send_fds(self.orders, [order], [writer, go_reader])
            with self.orders.makefile("rb") as answers:
                pid = answers.readline()
            process = AdoptedProcess(int(pid))
            os.write(go_writer, b"g")  # it ends without this, so that none runs which came too late
        except (OSError, ValueError) as problem:
            os.close(reader)
            raise OSError(f"a spare made no process: {problem}") from problem
        finally:
            for descriptor in (writer, go_reader, go_writer):
                os.close(descriptor)
        splitter = OutputSplitter() if terminal else None
        return Rank(self.rank.index, self.rank.world_size, process, reader, log, splitter=splitter)

    def end(self) -> None:
        """Kills the process and closes its streams."""
        self.orders.close()
        self.rank.signal_group(signal.SIGKILL)
        self.rank.process.wait()
        os.close(self.rank.output)


class SpareRanks:
    """The spares of this machine.

    They start once the ranks have taken a step. By then they do not slow down the start of the ranks, and a
    rank has told what it has imported.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="neox_spares_")  # not log_dir, which machines may share
        adopt_orphans()  # forks of spares, whose parents end at once
        self._num_starts, self._next_burial = 0, 0.0
        self._imported_files: list[str] = []
        self._spares: dict[int, _Spare] = {}  # by index of their rank
        self._has_failed = False

    def _bury_orphans(self, ranks: Sequence[Rank]) -> None:
        """Waits, from time to time, for ended processes of ranks that this one has adopted."""
        if time.monotonic() < self._next_burial:
            return
        self._next_burial = time.monotonic() + _BURIAL_S
        running = {rank.process.pid for rank in (*ranks, *(spare.rank for spare in self._spares.values()))}
        with suppress(OSError):  # outside Linux there are none
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            for pid in {int(child) for child in children} - running:
                os.waitpid(pid, os.WNOHANG)

    def _code_changed_at(self, script: Path) -> int:
        """Returns when the package, the script, or an imported module of the user's last changed, in ns
        since 1970."""
        package = Path(__file__).resolve().parents[1]
        paths = {script, *package.rglob("*.py"), *map(Path, self._imported_files)}
        return max((os.stat(path).st_mtime_ns for path in paths if path.exists()), default=0)

    @property
    def _imports(self) -> Path:
        """The file with the imports of the present start."""
        return Path(self._folder.name) / f"imports_{self._num_starts}.json"

    def begin_start(self) -> dict[str, str]:
        """Returns the environment variable that makes a rank of the next start tell its imports, after its
        first step."""
        self._num_starts += 1
        return {IMPORTS: str(self._imports)}

    def take(self, command: Sequence[str], env: Mapping[str, str], log: LogFile) -> Rank | None:
        """Returns the rank of `env`, made by its spare, which begins to run; None if none waits for it."""
        index = int(env["RANK"])
        spare = self._spares.get(index)
        if spare is None:
            return None
        if spare.command != tuple(command) or self._code_changed_at(Path(spare.command[2])) > spare.started_ns:
            self._spares.pop(index).end()
            return None
        variables = {name: text for name, text in env.items() if spare.environment.get(name) != text}
        removed = dict.fromkeys(spare.environment.keys() - env.keys())
        order = (json.dumps({**removed, **variables}) + "\n").encode()
        try:
            if spare.forks():
                rank = spare.fork(order, log)
            else:
                spare.orders.sendall(order)
                rank = self._spares.pop(index).rank
                spare.orders.close()
        except OSError:
            say(f"deepy.py: the process that waited to become rank {index} has ended; another one is started")
            self._spares.pop(index).end()
            return None
        rank.log, rank.world_size = log, int(env["WORLD_SIZE"])
        return rank

    def renew(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], ranks: Sequence[Rank]) -> None:
        """Starts a spare for each rank that has none, once a rank has told its imports."""
        self._bury_orphans(ranks)
        missing = [rank.index not in self._spares for rank in ranks]
        if not any(missing) or self._has_failed or not self._imports.exists():
            return
        try:
            self._imported_files = json.loads(self._imports.read_text()).get("files", [])
            for rank, env in compress(zip(ranks, environments, strict=True), missing):
                self._spares[rank.index] = self._start(command, env, rank)
        except OSError as problem:  # the run needs no spares
            self._has_failed = True
            say(f"deepy.py: warning: no more spare ranks: a process cannot be started ({problem.strerror})")

    def close(self) -> None:
        """Ends all spares."""
        while self._spares:
            self._spares.popitem()[1].end()
        self._folder.cleanup()

    def _start(self, command: Sequence[str], env: Mapping[str, str], rank: Rank) -> _Spare:
        python, unbuffered, script, *words = command
        env = {name: text for name, text in env.items() if name != IMPORTS}  # it is told when it becomes a rank
        launcher_end, spare_end = socket.socketpair()
        program = _PROGRAM.format(script=script, imports=str(self._imports), orders=spare_end.fileno())
        waiting, started_ns = (python, unbuffered, "-P", "-c", program, *words), time.time_ns()
        try:
            spare = start_rank(rank.index, rank.world_size, waiting, env, rank.log, descriptors=(spare_end.fileno(),))
        except BaseException:
            launcher_end.close()
            raise
        finally:
            spare_end.close()
        return _Spare(spare, tuple(command), env, launcher_end, started_ns)
