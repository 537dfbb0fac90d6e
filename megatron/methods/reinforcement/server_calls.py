"""Sends JSON requests over HTTP to the servers that write answers, and retries them."""

import http.client
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from megatron.neox_arguments.errors import UserError
from megatron.neox_arguments.values.json_text import parse_json

_TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)  # a retry may succeed
_SHOWN_CHARACTERS = 300  # characters of an answer, in errors


class ServerError(UserError):
    """Raised if a server of `rollout.servers` cannot be reached, or answers with an error."""


class _RefusalError(Exception):
    """Raised if a server answers with an HTTP error status."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status, self.content = status, content


class Connection:
    """A connection to one server, usable from any number of threads.

    It ignores the proxies set in the environment, because servers are in the cluster.
    """

    def __init__(self, address: str, token: str | None, timeout_s: float, say: Callable[[str], None]) -> None:
        """Takes the server's address; it connects at the first call.

        token: bearer token; None: none is sent. timeout_s: limit for one answer, and for all retries of a
            call together.
        say: logs why a call is retried.
        """
        self.address, self.token, self.timeout_s, self.say = address, token, timeout_s, say
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def error(self, text: str) -> ServerError:
        """Returns an error that names this server. The caller raises it."""
        return ServerError(f"rollout.servers: {self.address}: {text}")

    def call(self, path: str, body: Any = None, hint_500: str | None = None) -> Any:
        """Sends a POST request with `body` as JSON, or a GET request if it is None, and returns the reply's
        JSON.

        Returns None for an empty reply. hint_500: likely cause of status 500, for the error; with a hint that
        status is not retried. Raises ServerError if the call fails in the end.
        """
        import tenacity

        method_and_path = f"{'GET' if body is None else 'POST'} {path}"

        def tell(state: Any) -> None:
            if state.attempt_number == 1:
                problem = state.outcome.exception()
                self.say(f"rollout.servers: {self.address}: {method_and_path}: {_reason(problem)}; retrying")

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(
                lambda problem: _is_transient(problem) and not _is_explained(problem, hint_500)
            ),
            stop=tenacity.stop_any(
                tenacity.stop_after_delay(self.timeout_s), tenacity.stop_when_event_set(self._closed)
            ),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
            sleep=tenacity.sleep_using_event(self._closed),
            before_sleep=tell,
            reraise=True,
        )
        try:
            content = tries(self._send, path, body)
        except (_RefusalError, OSError, http.client.HTTPException) as problem:
            retries = (
                f", also after {self.timeout_s:g} s of retries (rollout.server_timeout_s); check that the server runs"
                if _is_transient(problem)
                else ""
            )
            hint = f"; the cause {hint_500}" if _is_explained(problem, hint_500) else retries
            raise self.error(f"{method_and_path}: {_reason(problem)}{hint}") from None
        try:
            return parse_json(content) if content.strip() else None
        except ValueError:
            raise self.error(
                f"{method_and_path}: answered no JSON, so this may be no server of rollout.server_api: "
                f"{content[:_SHOWN_CHARACTERS]!r}"
            ) from None

    def close(self) -> None:
        """Stops all retries, and breaks open connections, so that waiting calls fail."""
        self._closed.set()
        with self._lock:
            for connection in self._open:
                with suppress(OSError, AttributeError):  # not connected yet, or no longer
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _send(self, path: str, body: Any) -> bytes:
        parts, headers = urlsplit(self.address), {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        with self._lock:
            if self._closed.is_set():
                raise ConnectionError("the run ends, so no request is sent any more")
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


def _is_transient(problem: BaseException) -> bool:
    if isinstance(problem, _RefusalError):
        return problem.status in _TRANSIENT_STATUSES
    return isinstance(problem, OSError | http.client.HTTPException)


def _is_explained(problem: BaseException, hint_500: str | None) -> bool:
    return hint_500 is not None and isinstance(problem, _RefusalError) and problem.status == 500


def _reason(problem: BaseException) -> str:
    if isinstance(problem, _RefusalError):
        text = problem.content.decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            text = parse_json(text)["error"]["message"]
        advice = "; set NEOX_SERVE_TOKEN to its token" if problem.status == 401 else ""
        return f"answered {problem.status}: {' '.join(text.split())[:_SHOWN_CHARACTERS]}{advice}"
    return f"cannot be reached ({problem})" if isinstance(problem, OSError) else f"the connection broke ({problem!r})"
