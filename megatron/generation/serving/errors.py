"""Errors as clients see them, in the shape of OpenAI's API."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass
class APIError(Exception):
    """An HTTP error response.

    param: the invalid field of the body. code: the error's name, for programs. retry_after: seconds after
        which the client may try again; None: it should not.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        """Returns the JSON object of the response's body."""
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        code = self.code or HTTPStatus(self.status).phrase.lower().replace(" ", "_")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def headers(self) -> dict[str, str]:
        """Returns the response's headers. OpenAI's clients look at `x-should-retry` before they look at the
        status."""
        retry = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {**retry, "x-should-retry": "false" if self.retry_after is None else "true"}
