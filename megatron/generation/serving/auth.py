"""Which clients are let in, and how much of a request's body is read."""

import asyncio
import hmac
import ipaddress
from dataclasses import dataclass

from starlette.requests import Request

from megatron.generation.serving.errors import APIError

_OVERRUN = 8  # a body this much longer than allowed is still read to its end, so that the client reads the answer


@dataclass(frozen=True)
class AccessControl:
    """Checks of a request before it is parsed.

    token: clients must send `Authorization: Bearer TOKEN`. None asks for no token, and accepts only names of
    this machine as Host, so that a page in a browser cannot reach a server on loopback by a name of its own
    (DNS rebinding). body_bytes, body_seconds: limits of a request's body.
    """

    token: str | None
    body_bytes: int
    body_seconds: float

    def check(self, request: Request) -> None:
        """Raise APIError 401 for a missing or wrong token, 403 for a foreign Host."""
        if self.token is None:
            if not _is_loopback(host := request.headers.get("host", "")):
                raise APIError(403, f"Host: {host!r} is not this machine; use localhost or 127.0.0.1")
            return
        authorization = request.headers.get("authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            raise APIError(401, "a token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")

    async def read_body(self, request: Request) -> bytes:
        """The body. Raises APIError when it is too long (413), too slow (408) or not declared as JSON
        (415)."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":  # browsers ask before they send this elsewhere
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
                408, f"the body was not there after {self.body_seconds:g} s (serve_body_timeout_s)"
            ) from None
        if size > self.body_bytes:
            raise APIError(413, f"the body is longer than {self.body_bytes} bytes (serve_max_body_bytes)")
        return b"".join(parts)


def _is_loopback(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
