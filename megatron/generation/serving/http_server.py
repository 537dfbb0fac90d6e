"""Opens the socket of the server, and runs the thread that handles HTTP."""

import asyncio
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.generation.prompts.files import read_key_file
from megatron.neox_arguments import NeoXArgs

TOKEN_VARIABLE = "NEOX_SERVE_TOKEN"


@dataclass(frozen=True)
class ServerSocket:
    """The socket of the server and the token of its clients.

    socket: bound to the server's address, but not listening yet.
    token: the bearer token that clients must send; None: clients need no token.
    """

    socket: socket.socket
    token: str | None

    @property
    def address(self) -> str:
        """The URL of the server, such as `http://127.0.0.1:8000`."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_server_socket(args: NeoXArgs) -> ServerSocket:
    """Binds a socket to `serve_host` and `serve_port`, and reads the clients' token.

    The token is in the file `serve_token_file` or in the environment variable NEOX_SERVE_TOKEN. Raises
    ConfigError if the address is in use or is not this machine's, or if other machines can reach it and there
    is no token.
    """
    token = _find_token(args)
    return ServerSocket(_bind(args, token is not None), token)


def _find_token(args: NeoXArgs) -> str | None:
    if args.serve_token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    token = read_key_file(args, "serve_token_file").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise args.error("serve_token_file", f"{args.serve_token_file}: expected one word of ASCII characters as token")
    return token


def _bind(args: NeoXArgs, has_token: bool) -> socket.socket:
    host, port = args.serve_host, args.serve_port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as cause:
        raise args.error("serve_host", f"{host}: is not an address of this machine ({cause.strerror})") from cause
    if not has_token and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise args.error(
            "serve_host", f"{host}: other machines can reach this address, so a token is needed; set serve_token_file "
            f"or the environment variable {TOKEN_VARIABLE}, or leave serve_host at 127.0.0.1",
        )  # fmt: skip
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as cause:
        bound.close()
        raise args.error("serve_port", f"{port} on {host}: {cause.strerror}; choose another port (--port)") from cause
    return bound


class _HeaderTimeoutProtocol(H11Protocol):
    """Extends uvicorn's HTTP/1.1 protocol: closes connections that take too long to send a request's header.

    The header must be complete within `seconds` after the client connected. For later requests on the same
    connection, the time begins with the first byte after the last response.
    """

    def __init__(self, seconds: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _restart_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the header has arrived
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        elif self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self.transport.close)


class HTTPServerThread:
    """A thread that serves an ASGI application over HTTP, with its own event loop."""

    def __init__(self, bound: socket.socket, app: Any, on_end: Callable[[], None], header_seconds: float) -> None:
        """Starts the thread and waits until it listens on the socket `bound`. Raises OSError if it cannot
        listen.

        app: the ASGI application. on_end: called in the thread when the thread ends, by `close` or by an
            error. header_seconds: time limit for the arrival of a request's header.
        """
        config = uvicorn.Config(
            app, http=partial(_HeaderTimeoutProtocol, header_seconds),  # type: ignore[arg-type]
            ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, timeout_graceful_shutdown=5,
        )  # fmt: skip
        self.loop = asyncio.new_event_loop()
        self.problem: BaseException | None = None
        self._server, self._on_end = uvicorn.Server(config), on_end
        self._thread = threading.Thread(target=self._run, args=(bound,), name="http", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if self.problem is not None:
            raise self.problem

    def _run(self, bound: socket.socket) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._server.serve(sockets=[bound]))
        except BaseException as problem:  # raised again in the main thread
            self.problem = problem
        self._on_end()

    def call_soon(self, work: Callable[..., None], *arguments: Any) -> None:
        """Schedules the call `work(*arguments)` in the thread's event loop, and returns without waiting for
        the call."""
        self.loop.call_soon_threadsafe(work, *arguments)

    def close(self) -> None:
        """Ends the thread. Running responses have 5 s to finish. If the thread has failed, raises its
        exception."""
        self._server.should_exit = True
        self._thread.join(timeout=10)
        if self.problem is not None:
            raise self.problem
