"""Trains the runs of a sweep on this machine, one or several at a time, each in its own process."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.experiments.errors import RunError
from megatron.experiments.sweep_file import Link, Sweep
from megatron.experiments.sweep_link import REFUSED, LinkWork, read_record
from megatron.launch import install_root
from megatron.launch.devices import visible_gpus
from megatron.launch.ranks import die_with_parent
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.errors import ConfigError
from megatron.pipelines.errors import STOPPED

_LOOKS_S = 0.1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def check_runs(sweep: Sweep, cwd: Path) -> None:
    """Raises ConfigError for mistakes in the configuration of any run, before the first one starts."""
    problems: list[str] = []
    for link in sweep.links:
        try:
            args = LinkWork(sweep, link, cwd, print).args()
            if link.stage is None or link.stage.kind == "train":
                args.check_training()
            if link.stage is None:
                _check_comparable(args)
        except ConfigError as problem:
            problems += problem.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _check_comparable(args: NeoXArgs) -> None:
    """Raises ConfigError if the run would depend on where it is started, or is a branch of another run."""
    if args.user_values.get("train_batch_size") is None:
        raise args.error("train_batch_size", "is not set, so it would depend on the number of a run's ranks; set it in "
                         "the base")  # fmt: skip
    if args.branched_from is not None:
        raise args.error("branched_from", "a run of a sweep is no branch; remove the key, and set load, iteration and "
                         "finetune for the weights to begin with")  # fmt: skip


def device_shares(parallel: int, env: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the variables that give each of `parallel` runs its share of this machine's GPUs.

    Raises RunError if there are fewer GPUs than runs."""
    gpus = visible_gpus(env)
    if parallel == 1 or not gpus:
        return [{} for _ in range(parallel)]
    count = len(gpus) // parallel
    if count == 0:
        raise RunError(f"parallel: {parallel} runs at a time need as many GPUs, here are {len(gpus)}; lower parallel")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * count : (i + 1) * count])} for i in range(parallel)]


class Scheduler:
    """Starts runs when their parents have finished and a slot is free, until nothing is left to start.

    SIGTERM, SIGINT and SIGUSR1 are passed on to all runs, which save and end; none is started afterwards.
    """

    def __init__(self, sweep: Sweep, cwd: Path, lock: IO[str], say: Callable[[str], None]) -> None:
        """lock: the sweep's open lock file. Runs inherit it, so that it is held until all have ended."""
        self._sweep, self._cwd, self._lock, self._say = sweep, cwd, lock, say
        self._shares = device_shares(sweep.keys.parallel, os.environ)
        self._running: dict[int, tuple[Link, subprocess.Popen[bytes]]] = {}  # by slot
        self._stopped: int | None = None

    def run(self, links: Sequence[Link]) -> int:
        """Runs `links`, parents before children; their other parents have finished. Returns the exit code."""
        waiting, starts = list(links), Counter[str]()
        done = {link.name for link in self._sweep.links} - {link.name for link in links}
        lost: set[str] = set()  # names of runs that failed or are not started because their parent failed
        with self._signals_passed_on():
            while self._running or (waiting and self._stopped is None):
                for link, code in list(self._ended_runs()):
                    if code == 0:
                        done.add(link.name)
                    elif self._stopped is None and self._may_retry(link, starts[link.name]):
                        self._say(f"{link.name}: is started again ({starts[link.name]} of {self._sweep.keys.retry})")
                        waiting.insert(0, link)
                    else:
                        lost.add(link.name)
                for link in [link for link in waiting if link.parent is not None and link.parent.name in lost]:
                    self._say(
                        f"{link.name}: not started, because {link.parent.name if link.parent else ''} did not finish"
                    )
                    waiting.remove(link)
                    lost.add(link.name)
                ready = [link for link in waiting if link.parent is None or link.parent.name in done]
                for slot in range(self._sweep.keys.parallel):
                    if slot not in self._running and ready and self._stopped is None:
                        link = ready.pop(0)
                        waiting.remove(link)
                        starts[link.name] += 1
                        self._running[slot] = link, self._start(link, slot)
                time.sleep(_LOOKS_S)
        if self._stopped is not None:
            return STOPPED if self._stopped == signal.SIGUSR1 else 128 + self._stopped
        return 1 if lost else 0

    def _may_retry(self, link: Link, starts: int) -> bool:
        return starts <= self._sweep.keys.retry and read_record(link).status != REFUSED

    def _ended_runs(self) -> Iterator[tuple[Link, int]]:
        for slot, (link, process) in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[slot]
                yield link, code

    def _start(self, link: Link, slot: int) -> "subprocess.Popen[bytes]":
        deepy, file = str(install_root() / "deepy.py"), str(self._sweep.file)
        return subprocess.Popen(
            [sys.executable, deepy, "sweep", "run", file, "--only", link.name, "--cwd", str(self._cwd)],
            env={**os.environ, **self._shares[slot]}, stdin=subprocess.DEVNULL, pass_fds=(self._lock.fileno(),),
            preexec_fn=die_with_parent(signal.SIGTERM),
            process_group=0,  # the terminal's Ctrl-C reaches only this process, which passes it on
        )  # fmt: skip

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        handlers = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: Any) -> None:
        self._stopped = number
        for _, process in self._running.values():
            if process.poll() is None:
                process.send_signal(number)
