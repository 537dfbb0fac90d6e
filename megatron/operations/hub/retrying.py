"""Retries failed requests to the Hub: decides which failures to retry, when, and with which message.

huggingface_hub itself retries a request five times within half a minute, and waits silently if the Hub sends
Retry-After. `watch_answers` disables this for HTTP 408, 429 and 5xx, so that only the policy of this module
applies. After a broken connection huggingface_hub still makes its own retries first.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.neox_arguments.addresses import without_secrets
from megatron.operations.hub.errors import HubError

if TYPE_CHECKING:
    from tenacity import RetryCallState

Result = TypeVar("Result")
Say = Callable[[str], None]

_PASSING = (408, 429, 500, 502, 503, 504)  # HTTP codes of temporary failures: a later request may succeed
_CONFLICT = (409, 412)  # HTTP codes if another client committed in the meantime
_SECONDS = 600.0  # timeout without a byte sent or received


@dataclass(frozen=True)
class Patience:
    """The retry policy for temporary failures of requests: number of retries, and seconds between them.

    A wait is the Hub's Retry-After if sent; otherwise waits double from `min_wait_s`. No wait is longer than
    `max_wait_s`.
    """

    max_retries: int = 20
    min_wait_s: float = 120.0
    max_wait_s: float = 3600.0


class HubBusyError(Exception):
    """The Hub answered with HTTP 408, 429 or 5xx. retry_after: seconds to wait, None if the Hub does not
    say."""

    def __init__(self, status: int, request: str, retry_after: float | None) -> None:
        self.status, self.retry_after = status, retry_after
        super().__init__(f"the Hub answered {status} to {request}")


def watch_answers() -> None:
    """Makes huggingface_hub raise HubBusyError for HTTP 408, 429 and 5xx, instead of waiting itself.

    Also sets a timeout of ten minutes without data. Hides progress bars, and log lines, which may contain
    signed URLs.
    """
    import huggingface_hub
    from huggingface_hub import utils

    default_factory = utils._http.default_client_factory

    def client() -> Any:
        http_client = default_factory()
        http_client.timeout = _SECONDS
        hooks = http_client.event_hooks
        http_client.event_hooks = {**hooks, "response": [*hooks.get("response", []), _raise_busy]}
        return http_client

    huggingface_hub.set_client_factory(client)
    utils.disable_progress_bars()
    utils.logging.set_verbosity(utils.logging.CRITICAL)


def _raise_busy(response: Any) -> None:
    if response.status_code in _PASSING:
        request = response.request
        description = f"{request.method} {request.url.path}"
        raise HubBusyError(response.status_code, description, _retry_after(response.headers))


def _retry_after(headers: Any) -> float | None:
    """Returns the seconds that the Hub asks to wait, from the headers of its response; None if it does not
    say.

    Source: Retry-After (seconds or a date), else the RateLimit header if it says that no request is left.
    """
    value = headers.get("Retry-After")
    if value is not None:
        if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
            return float(value)
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except (ValueError, TypeError, OverflowError):
            return None
    match = re.search(r";\s*r=0\b.*?;\s*t=(\d+)", headers.get("RateLimit") or "")
    return float(match[1]) if match else None


def call(patience: Patience, action: str, function: Callable[[], Result], say: Say) -> Result:
    """Calls `function`, which sends a request to the Hub, and returns its result; retries temporary failures.

    patience: the retry policy.
    action: description of the request in messages, such as "sending model.safetensors".
    say: called before each retry with a message: the reason, and the seconds of the wait.

    Raises HubError for permanent failures, and if all retries failed.
    """
    import tenacity

    longest = patience.max_wait_s
    exponential_wait = tenacity.wait_exponential(multiplier=patience.min_wait_s, max=patience.max_wait_s)

    def wait(state: "RetryCallState") -> float:
        busy = _busy(state)
        return exponential_wait(state) if busy is None or busy.retry_after is None else min(busy.retry_after, longest)

    def tell(state: "RetryCallState") -> None:
        assert state.outcome is not None and state.next_action is not None
        busy, reason = _busy(state), one_line(_cause(state.outcome.exception()))
        wait_note = ""
        if busy is not None and busy.retry_after is not None:
            wait_note = ", as the Hub says"
            if busy.retry_after > longest:
                wait_note = f" (--retry-max-wait), although the Hub says {busy.retry_after:.0f} s"
        say(
            f"{action}: {reason}; retrying in {state.next_action.sleep:.0f} s{wait_note} "
            f"(retry {state.attempt_number} of {patience.max_retries})"
        )

    try:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(_passes),
            stop=tenacity.stop_after_attempt(patience.max_retries + 1),
            wait=wait,
            before_sleep=tell,
            reraise=True,
        )(function)
    except HubError:
        raise
    except Exception as problem:
        raise HubError(f"{action}: {_advice(problem, patience)}") from None


def _busy(state: "RetryCallState") -> HubBusyError | None:
    problem = None if state.outcome is None else state.outcome.exception()
    return next((cause for cause in _chain(problem) if isinstance(cause, HubBusyError)), None)


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, then its causes in order; huggingface_hub wraps exceptions of its threads in
    others."""
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__


def _cause(problem: BaseException | None) -> BaseException:
    """Returns the first error of the Hub or the connection among an exception and its causes; else
    `problem`."""
    return next((cause for cause in _chain(problem) if _is_hub_error(cause)), problem or RuntimeError("no reason"))


def _is_hub_error(problem: BaseException) -> bool:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(problem, HubBusyError | httpx2.TransportError | HfHubHTTPError | ConnectionError)


def _passes(problem: BaseException) -> bool:
    """Returns whether an exception is a temporary failure, so that a retry may succeed."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for cause in _chain(problem):
        if isinstance(cause, OfflineModeIsEnabled | HubError):
            return False
        if isinstance(cause, HubBusyError | httpx2.TransportError | ConnectionError | TimeoutError):
            return True
        if isinstance(cause, HfHubHTTPError):
            return cause.response is not None and cause.response.status_code in (*_PASSING, *_CONFLICT)
    return False


def _advice(problem: BaseException, patience: Patience) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    cause = _cause(problem)
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to upload"
    if _passes(problem):
        return f"{one_line(cause)}, also after {patience.max_retries} retries; run the same command again to continue"
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) and cause.response is not None else None
    if status == 401:
        return "the Hub rejects the token (401); set HF_TOKEN in .env to a token with write access"
    if status == 403:
        return "the token may not do this (403); use a token that may write to repositories of this organisation"
    if status == 404:
        return f"the Hub has no such repository or revision (404): {one_line(cause)}"
    return one_line(cause) if _is_hub_error(cause) else f"{type(cause).__name__}: {one_line(cause)}"


def one_line(problem: BaseException) -> str:
    """Returns the message of an exception as one line, with the Hub token and secrets in URLs hidden."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return hide_token(without_secrets(text))


def hide_token(text: str) -> str:
    """Returns the text with this process's Hub token replaced by ***."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "***") if token else text
