"""Authenticates clients, and limits the size and the arrival time of a request's body."""

import asyncio
import hmac
import ipaddress
from dataclasses import dataclass

from starlette.requests import Request

from megatron.generation.serving.errors import APIError

_OVERRUN = 8  # a body this much longer than allowed is still read to its end, so that the client reads the answer


@dataclass(frozen=True)
class AccessControl:
    """Checks an HTTP request before it is parsed.

    token: the token that clients must send as `Authorization: Bearer TOKEN`. None: no token is needed, but
        the Host header must name this machine. Otherwise a web page could reach a server on loopback under a
        foreign name (DNS rebinding).
    body_bytes: most bytes of a request's body. body_seconds: most seconds until the body has arrived.
    """

    token: str | None
    body_bytes: int
    body_seconds: float

    def check(self, request: Request) -> None:
        """Raises APIError 401 if the token is missing or wrong, 403 if the Host header does not name this
        machine."""
        if self.token is None:
            if not _is_loopback(host := request.headers.get("host", "")):
                raise APIError(403, f"Host: {host!r} does not name this machine; use localhost or 127.0.0.1")
            return
        authorization = request.headers.get("authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            raise APIError(
                401,
                "the token is missing or wrong: send the server's token as Authorization: Bearer TOKEN",
                code="invalid_api_key",
            )

    async def read_body(self, request: Request) -> bytes:
        """Returns the body of a request. Raises APIError if the body is too long (413), arrives too slowly
        (408) or is not declared as JSON (415)."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":  # browsers ask before they send JSON to another site
            raise APIError(415, f"Content-Type: expected application/json, got {content_type!r}")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size <= self.body_bytes:
                        parts.append(part)
                    elif size > _OVERRUN * self.body_bytes:
                        break
        except TimeoutError:
            raise APIError(
                408, f"the body did not arrive within {self.body_seconds:g} s (serve_body_timeout_s)"
            ) from None
        if size > self.body_bytes:
            raise APIError(413, f"the body is longer than the limit of {self.body_bytes} bytes (serve_max_body_bytes)")
        return b"".join(parts)


def _is_loopback(host: str) -> bool:
    """Returns whether a Host header, with or without a port, is localhost or a loopback address."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
