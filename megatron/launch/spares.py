"""Keeps spares beside the ranks of a run with `max_restarts`: processes that wait to become its next ranks.

A spare has imported everything that a rank imports, which takes most of a start. It holds no model and has no
connection to other ranks. Its program is `megatron.process.spare`.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.launch.ranks import Rank, start_rank
from megatron.process import LogFile, say
from megatron.process.spare import IMPORTS

# Nothing of megatron is imported before `sys.path` is the rank's: it may have its package from elsewhere.
_PROGRAM = (
    "import json, sys; report = json.load(open({imports!r})); sys.path[:] = report['path']; "
    "from megatron.process.spare import wait; wait({script!r}, sys.argv[1:], report, {orders})"
)


@dataclass(frozen=True)
class _Spare:
    """A waiting process.

    environment: variables it was started with. orders: descriptor to which its rank's variables are written.
    started_ns: time of its start, in ns since 1970.
    """

    rank: Rank
    command: tuple[str, ...]
    environment: Mapping[str, str]
    orders: int
    started_ns: int

    def end(self) -> None:
        """Kills the process and closes its streams."""
        os.close(self.orders)
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
        self._num_starts = 0
        self._spares: dict[int, _Spare] = {}  # by index of their rank
        self._has_failed = False

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
        """Returns a spare that begins to run as the rank of `env`; None if none waits for this rank."""
        spare = self._spares.pop(int(env["RANK"]), None)
        if spare is None:
            return None
        if spare.command != tuple(command) or _code_changed_at(Path(spare.command[2])) > spare.started_ns:
            spare.end()
            return None
        variables = {name: text for name, text in env.items() if spare.environment.get(name) != text}
        try:
            os.write(spare.orders, (json.dumps(variables) + "\n").encode())
        except BrokenPipeError:
            say(f"deepy.py: the process that waited to become rank {env['RANK']} has ended; another one is started")
            spare.end()
            return None
        os.close(spare.orders)
        spare.rank.log, spare.rank.world_size = log, int(env["WORLD_SIZE"])
        return spare.rank

    def renew(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], ranks: Sequence[Rank]) -> None:
        """Starts a spare for each rank that has none, once a rank has told its imports."""
        missing = [rank.index not in self._spares for rank in ranks]
        if not any(missing) or self._has_failed or not self._imports.exists():
            return
        try:
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
        reader, writer = os.pipe()
        program = _PROGRAM.format(script=script, imports=str(self._imports), orders=reader)
        waiting, started_ns = (python, unbuffered, "-P", "-c", program, *words), time.time_ns()
        try:
            spare = start_rank(rank.index, rank.world_size, waiting, env, rank.log, descriptors=(reader,))
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return _Spare(spare, tuple(command), env, writer, started_ns)


def _code_changed_at(script: Path) -> int:
    """Returns the time of the last change of the package's files or the script, in ns since 1970."""
    package = Path(__file__).resolve().parents[1]
    times = [os.stat(path).st_mtime_ns for path in (script, *package.rglob("*.py")) if path.exists()]
    return max(times, default=0)
