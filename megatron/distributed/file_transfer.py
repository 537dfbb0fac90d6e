"""Sends files from machine to machine through the connections of the run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 64 << 20  # bytes sent at once


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another.

    source, target: ranks. name: path inside the folder, which each of them has. size: in bytes.
    """

    source: int
    target: int
    name: str
    size: int


def transfer_files(
    transfers: Iterable[Transfer], rank: int, folder: Path, group: dist.ProcessGroup | None
) -> Sequence[str]:
    """Sends and receives the files of this rank, and returns the names of those that it received.

    All source and target ranks call this function with equal `transfers`, in one order.

    rank: of this process. folder: of this rank's files. group: of gloo, with all of these ranks.
    Raises OSError at the end, if a file could not be read or written: the others still wait for its bytes.
    """
    received: list[str] = []
    problem: OSError | None = None
    for transfer in transfers:
        if rank not in (transfer.source, transfer.target):
            continue
        path = folder / transfer.name
        try:
            if rank == transfer.source:
                _send(path, transfer, group)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                _receive(path, transfer, group)
                received.append(transfer.name)
        except OSError as caught:
            problem = problem or caught
    if problem is not None:
        raise problem
    return received


def _send(path: Path, transfer: Transfer, group: dist.ProcessGroup | None) -> None:
    with _late_error(path, "rb") as use_file:
        for chunk in _chunks(transfer.size):
            use_file(lambda file: file.readinto(chunk.numpy()))  # noqa: B023 (called at once)
            dist.send(chunk, transfer.target, group)


def _receive(path: Path, transfer: Transfer, group: dist.ProcessGroup | None) -> None:
    with _late_error(path, "wb") as use_file:
        for chunk in _chunks(transfer.size):
            dist.recv(chunk, transfer.source, group)
            use_file(lambda file: file.write(chunk.numpy()))  # noqa: B023 (called at once)


def _chunks(size: int) -> Iterator[Tensor]:
    for begin in range(0, size, _CHUNK):
        yield torch.zeros(min(_CHUNK, size - begin), dtype=torch.uint8)


@contextmanager
def _late_error(path: Path, mode: str) -> Iterator[Callable[[Callable[[Any], Any]], None]]:
    """Opens a file, and yields a function that calls another one with it.

    After an OSError it does nothing more; the error is raised at the end, because the other rank goes on to
    send or receive.
    """
    with ExitStack() as stack:
        file: Any = None
        problem: OSError | None = None

        def use(function: Callable[[Any], Any]) -> None:
            nonlocal file, problem
            try:
                file = file or stack.enter_context(path.open(mode))
                if problem is None:
                    function(file)
            except OSError as caught:
                problem = problem or caught

        use(lambda file: None)  # makes an empty file, too
        yield use
        if problem is not None:
            raise problem
