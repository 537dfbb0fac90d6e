"""The side of the pool that tests see: hand a function to the server, get every rank's result."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.pool.protocol import ADDRESS_VARIABLE, Job, receive, send

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Results of `fn(rank, world_size, *args, **kwargs)` on every rank, in rank order.

    fn: a function of a module's top level; it, its arguments and its result are pickled. Each rank is a fresh
    process on the CPU with one thread, RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* set (and `env` on top) and,
    unless `init` is false, a gloo process group. timeout: seconds for the job. Raises AssertionError with the
    traceback of the rank that failed first, or with every rank's stack when the time is up.
    """
    if "<" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} cannot be sent to other processes; move it to its module's top level")
    job = Job(
        module=fn.__module__,
        call=pickle.dumps((fn, args, kwargs)),
        world_size=world_size,
        timeout=timeout,
        init=init,
        env=dict(env or {}),
        path=tuple(sys.path),
        folder=os.getcwd(),
    )
    sys.audit("tests.pool.ranks", world_size)  # counted by tests/budget.py
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS_VARIABLE])
        send(connection, job)
        reply = receive(connection)
    if reply is None:
        raise AssertionError("the pool's server ended during the job")
    sys.stdout.write(reply.output)
    if reply.failure is not None:
        raise AssertionError(reply.failure)
    return [pickle.loads(result) for result in reply.results]


def start_server() -> subprocess.Popen[bytes]:
    """Start the server of this pytest run and leave its address in the environment, for forked tests too."""
    folder = tempfile.mkdtemp(prefix="neox-pool-")
    address = os.path.join(folder, "socket")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with socket.socket(socket.AF_UNIX) as listener, open(os.path.join(folder, "log"), "wb") as log:
        # The server inherits the socket, so that a test can connect before the server is up.
        listener.bind(address)
        listener.listen(16)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.pool.server", str(listener.fileno()), str(os.getpid())],
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
    os.environ[ADDRESS_VARIABLE] = address
    return server


def stop_server(server: subprocess.Popen[bytes]) -> None:
    """End the server, its ranks and its folder."""
    address = os.environ.pop(ADDRESS_VARIABLE)
    server.terminate()
    server.wait()
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)
