"""What a client is told when its request comes to nothing, in the shape OpenAI's API gives it."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass
class APIError(Exception):
    """An HTTP error. param: the field that is wrong; code: a name for programs; retry_after: seconds, where trying
    again may help."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        code = self.code or HTTPStatus(self.status).phrase.lower().replace(" ", "_")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def headers(self) -> dict[str, str]:
        """`x-should-retry` is what OpenAI's clients look at before the status."""
        again = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {**again, "x-should-retry": "false" if self.retry_after is None else "true"}
