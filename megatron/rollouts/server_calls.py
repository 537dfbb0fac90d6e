"""JSON over HTTP to servers that write answers, tried again where that may help."""

import http.client
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.optional_packages import import_optional

_PASSING = (408, 429, 500, 502, 503, 504)  # answers that are another one later
_SHOWN = 300  # characters of an answer, in errors


class ServerError(UserError):
    """A server of `rollout.servers` that is not there, or does not do what it should."""


class _RefusalError(Exception):
    """An answer that says what went wrong, by its status."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status, self.content = status, content


class Connection:
    """A server at an address, asked by any number of threads. No proxy of the environment is between, since
    servers are of the cluster."""

    def __init__(self, address: str, token: str | None, timeout_s: float, say: Callable[[str], None]) -> None:
        """token: a bearer token. timeout_s: for an answer, and for all tries. say: told why one is tried
        again. Raises ServerError where tenacity is missing."""
        self.address, self.token, self.timeout_s, self.say = address, token, timeout_s, say
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self.tenacity = import_optional(
            "tenacity", ServerError("rollout.servers: tenacity is not installed: pip install 'neox[hf]'")
        )

    def error(self, text: str) -> ServerError:
        """An error of this server, to be raised."""
        return ServerError(f"rollout.servers: {self.address}: {text}")

    def call(self, path: str, body: Any = None, once: str | None = None) -> Any:
        """What the server answers to a POST of `body` as JSON, or a GET for None; None for an empty answer.
        once: what an answer of its own error (500) may mean, after which nothing is tried again.

        Raises ServerError.
        """
        what, tenacity = f"{'GET' if body is None else 'POST'} {path}", self.tenacity

        def tell(state: Any) -> None:
            if state.attempt_number == 1:
                problem = state.outcome.exception()
                self.say(f"rollout.servers: {self.address}: {what}: {_reason(problem)}; tried again")

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda problem: _passes(problem) and not _failed(problem, once)),
            stop=tenacity.stop_any(
                tenacity.stop_after_delay(self.timeout_s), tenacity.stop_when_event_set(self._ended)
            ),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
            sleep=tenacity.sleep_using_event(self._ended),
            before_sleep=tell,
            reraise=True,
        )
        try:
            content = tries(self._once, path, body)
        except (_RefusalError, OSError, http.client.HTTPException) as problem:
            tried = (
                f", also after {self.timeout_s:g} s of trying (rollout.server_timeout_s)" if _passes(problem) else ""
            )
            more = f"; it {once}" if _failed(problem, once) else tried
            raise self.error(f"{what}: {_reason(problem)}{more}") from None
        try:
            return json.loads(content) if content.strip() else None
        except ValueError:
            raise self.error(f"{what}: answered no JSON: {content[:_SHOWN]!r}") from None

    def close(self) -> None:
        """Try nothing again, and break what is under way."""
        self._ended.set()
        with self._lock:
            for connection in self._open:
                with suppress(OSError, AttributeError):  # not connected yet, or no longer
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _once(self, path: str, body: Any) -> bytes:
        parts, headers = urlsplit(self.address), {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        with self._lock:
            if self._ended.is_set():
                raise ConnectionError("the run ends")
            self._open.add(connection)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if data is None else "POST", parts.path + path, data, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if answer.status >= 300:
            raise _RefusalError(answer.status, content)
        return content


def _passes(problem: BaseException) -> bool:
    if isinstance(problem, _RefusalError):
        return problem.status in _PASSING
    return isinstance(problem, OSError | http.client.HTTPException)


def _failed(problem: BaseException, once: str | None) -> bool:
    return once is not None and isinstance(problem, _RefusalError) and problem.status == 500


def _reason(problem: BaseException) -> str:
    if isinstance(problem, _RefusalError):
        said = problem.content.decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        advice = "; set NEOX_SERVE_TOKEN to its token" if problem.status == 401 else ""
        return f"answered {problem.status}: {' '.join(said.split())[:_SHOWN]}{advice}"
    return f"cannot be reached ({problem})" if isinstance(problem, OSError) else f"the connection broke ({problem!r})"
