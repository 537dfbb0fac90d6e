"""Defines the error responses that clients receive, in the format of OpenAI's API."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass
class APIError(Exception):
    """An exception that becomes an HTTP error response.

    status: the HTTP status. message: the error for people. param: name of the invalid field of the request's
        body; None: no single field is invalid. code: the error's name for programs; None: derived from the
        status. retry_after: seconds after which the client may try again; None: the client should not try
        again.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        """Returns the body of the response as a JSON object, in OpenAI's format."""
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        code = self.code or HTTPStatus(self.status).phrase.lower().replace(" ", "_")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def headers(self) -> dict[str, str]:
        """Returns the headers of the response, which say whether to retry. OpenAI's clients read
        `x-should-retry` before the status."""
        retry = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {**retry, "x-should-retry": "false" if self.retry_after is None else "true"}
