"""Ranks as forks of this process, in which everything a run needs is imported already."""

import importlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from megatron.launch.devices import free_port
from megatron.launch.environment import ProcessInfo
from megatron.process import STACKS_SIGNAL

GRACE_S = 1.5  # from the failure of one rank to the end of the others; deepy.py has 1 s before a restart
HANG_S = 90.0
_WARM = (
    "torch.distributed.fsdp", "torch._dynamo", "torch.utils.checkpoint", "deepspeed", "deepspeed.runtime.pipe.engine",
    "transformers", "megatron.training.native.engine", "megatron.training.deepspeed.engine",
)  # fmt: skip


def warm_up() -> None:
    """Imports what ranks import. Call it once, before any rank is forked."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
        GLOO_SOCKET_IFNAME="lo", NEOX_RESTARTS="0",
    )  # fmt: skip
    for name in _WARM:
        importlib.import_module(name)


class Runnable(Protocol):
    """A run on forked ranks.

    begin: sets its signal handlers in each of them, as its script does. main: called next; returns its exit
    code.
    """

    @property
    def ranks(self) -> int: ...

    def begin(self) -> None: ...

    def main(self) -> int: ...


@dataclass(frozen=True)
class Ending:
    """How a start of a run has ended.

    codes: of the ranks; -N after signal N. outputs: what they wrote to stdout and stderr.
    ended_early: ranks that had ended before the campaign ended the others.
    hung: whether it had to be ended after HANG_S.
    """

    codes: tuple[int, ...]
    outputs: tuple[str, ...]
    ended_early: tuple[int, ...]
    hung: bool
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Returns whether all ranks ended with code 0."""
        return not any(self.codes)

    @property
    def refusal(self) -> str | None:
        """Returns the error of a rank that ended with code 1 and one clear line; None if there is none."""
        refusals = (refusal_in(output) for code, output in zip(self.codes, self.outputs, strict=True) if code == 1)
        return next((refusal for refusal in refusals if refusal is not None), None)

    @property
    def traceback(self) -> str | None:
        """Returns the last lines of a rank's traceback; None if no rank wrote one."""
        for output in self.outputs:
            if "Traceback (most recent call last)" in output:
                return output.splitlines()[-1]
        return None


def refusal_in(output: str) -> str | None:
    """Returns the last line in which a command says what is wrong; None if there is none."""
    return next((line for line in reversed(output.splitlines()) if re.match(r"[\w.]+\.py: error: ", line)), None)


def run_ranks(
    run: Runnable,
    folder: Path,
    prepare: Callable[[int], None],
    name: str = "output",
    meanwhile: Callable[[], None] | None = None,
) -> Ending:
    """Runs something in a folder on forked ranks and waits for their end.

    prepare: called in each rank with its number, before the run's main function. name: of the files beside
    the folder that hold the ranks' outputs. meanwhile: called again and again while ranks run.
    """
    start, port, ranks = time.monotonic(), free_port(), run.ranks
    files = [folder.with_name(f"{folder.name}_{name}_{rank}") for rank in range(ranks)]  # its disk may be full
    for file in files:  # a rank may be ended before it opens its own
        file.touch()
    children = [
        _fork(run, ProcessInfo(rank, ranks, rank, ranks, "127.0.0.1", port, "torchrun"), folder, files[rank], prepare)
        for rank in range(ranks)
    ]
    codes: dict[int, int] = {}
    failed_at: float | None = None
    hung, ended_early = False, tuple(range(ranks))
    while len(codes) < ranks:
        _collect(children, codes)
        if meanwhile is not None:
            meanwhile()
        now = time.monotonic()
        if failed_at is None and any(codes.values()):
            failed_at = now
            ended_early = tuple(rank for rank, pid in enumerate(children) if pid in codes)
            _kill(children, codes, signal.SIGTERM)
        if now - start > HANG_S and not hung:
            hung = True
            _kill(children, codes, STACKS_SIGNAL)
            time.sleep(1.0)
            _kill(children, codes, signal.SIGKILL)
        if failed_at is not None and now - failed_at > GRACE_S:
            _kill(children, codes, signal.SIGKILL)
        time.sleep(0.02)
    for pid in children:  # data workers
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    outputs = tuple(path.read_text(errors="replace") for path in files)
    return Ending(tuple(codes[pid] for pid in children), outputs, ended_early, hung, time.monotonic() - start)


def _collect(children: Sequence[int], codes: dict[int, int]) -> None:
    for pid in children:
        if pid not in codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)


def _kill(children: Sequence[int], codes: dict[int, int], number: int) -> None:
    for pid in children:
        if pid not in codes:
            os.kill(pid, number)


def _fork(run: Runnable, info: ProcessInfo, folder: Path, output: Path, prepare: Callable[[int], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(run, info, folder, output, prepare)
    return pid


def _run(run: Runnable, info: ProcessInfo, folder: Path, output: Path, prepare: Callable[[int], None]) -> NoReturn:
    """Becomes a rank; never returns."""
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        import torch

        from megatron.process import end_process

        torch.set_num_threads(1)
        os.environ.update(info.variables())
        os.chdir(folder)
        run.begin()
        prepare(info.rank)
        end_process(run.main())
    except SystemExit as ending:  # as the interpreter does
        print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)
