"""Messages between client and server of the pool: one job and one reply a connection, pickled."""

import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

ADDRESS_VARIABLE = "NEOX_TEST_POOL"
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Job:
    """A call to make on every rank."""

    module: str  # of the function; the server imports it once, for all later jobs
    call: bytes  # pickled (function, args, kwargs)
    world_size: int
    timeout: float  # seconds
    init: bool  # make the gloo process group
    env: dict[str, str]
    path: tuple[str, ...]  # sys.path of the client
    folder: str  # its working directory


@dataclass(frozen=True)
class Reply:
    """Pickled results in rank order, or what went wrong; and what the ranks printed."""

    results: list[bytes] = field(default_factory=list)
    failure: str | None = None
    output: str = ""


def send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """The next message; None when the other side has gone."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    data = _exactly(connection, _LENGTH.unpack(head)[0])
    return None if data is None else pickle.loads(data)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = connection.recv(min(size - len(data), 1 << 20))
        except ConnectionError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)
