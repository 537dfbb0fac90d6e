"""What is tried again when the Hub does not take it, how long is waited in between, and what is said then.

huggingface_hub tries a request again by itself, five times within half a minute, and sleeps without a word
where the Hub names a time. `watch_answers` takes the answers 429 and 5xx away from it, so that this policy
alone waits for them; broken connections are first tried by it.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.optional_packages import import_optional
from megatron.operations.hub.errors import HubError

if TYPE_CHECKING:
    from tenacity import RetryCallState

Result = TypeVar("Result")
Say = Callable[[str], None]

_PASSING = (408, 429, 500, 502, 503, 504)  # answers that are another one later
_CONFLICT = (409, 412)  # somebody else's commit came in between
_SECONDS = 600.0  # in which a byte must have gone or come


@dataclass(frozen=True)
class Patience:
    """How often what failed in passing is tried again, and the seconds in between: those that the Hub itself
    names (Retry-After), else twice as many each time from `min_wait_s` on; never more than `max_wait_s`."""

    max_retries: int = 20
    min_wait_s: float = 120.0
    max_wait_s: float = 3600.0


class HubBusyError(Exception):
    """An answer of the Hub that says to come again later; retry_after: in how many seconds, None if it does
    not say."""

    def __init__(self, status: int, what: str, retry_after: float | None) -> None:
        self.status, self.retry_after = status, retry_after
        super().__init__(f"the Hub answered {status} to {what}")


def watch_answers() -> None:
    """Make huggingface_hub's client raise HubBusyError at once where it would wait, give up a connection that
    stands still for ten minutes, and print neither bars nor addresses, which may hold signatures."""
    import huggingface_hub
    from huggingface_hub import utils

    from_library = utils._http.default_client_factory

    def client() -> Any:
        made = from_library()
        made.timeout = _SECONDS
        made.event_hooks = {**made.event_hooks, "response": [*made.event_hooks.get("response", []), _raise_busy]}
        return made

    huggingface_hub.set_client_factory(client)
    utils.disable_progress_bars()
    utils.logging.set_verbosity(utils.logging.CRITICAL)


def _raise_busy(response: Any) -> None:
    if response.status_code in _PASSING:
        request = response.request
        what = f"{request.method} {request.url.path}"
        raise HubBusyError(response.status_code, what, _retry_after(response.headers))


def _retry_after(headers: Any) -> float | None:
    """The seconds of Retry-After, given as such or as a date, else those of the Hub's own RateLimit header
    where none is left; None without."""
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


def call(patience: Patience, what: str, function: Callable[[], Result], say: Say) -> Result:
    """The result of a function that asks the Hub, tried again as `patience` says; what: what it does, as
    "sending model.safetensors".

    say: told why and how long is waited. Raises HubError for what stays, and for what would not change.
    """
    tenacity = import_optional("tenacity", HubError("tenacity is not installed: pip install 'neox[hf]'"))
    longest = patience.max_wait_s
    by_clock = tenacity.wait_exponential(multiplier=patience.min_wait_s, max=patience.max_wait_s)

    def wait(state: "RetryCallState") -> float:
        busy = _busy(state)
        return by_clock(state) if busy is None or busy.retry_after is None else min(busy.retry_after, longest)

    def tell(state: "RetryCallState") -> None:
        assert state.outcome is not None and state.next_action is not None
        busy, reason = _busy(state), one_line(_cause(state.outcome.exception()))
        asked = ""
        if busy is not None and busy.retry_after is not None:
            asked = ", as the Hub says"
            if busy.retry_after > longest:
                asked = f" (--retry-max-wait), although the Hub says {busy.retry_after:.0f} s"
        say(
            f"{what}: {reason}; tried again in {state.next_action.sleep:.0f} s{asked} "
            f"({state.attempt_number} of {patience.max_retries})"
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
        raise HubError(f"{what}: {_advice(problem, patience)}") from None


def _busy(state: "RetryCallState") -> HubBusyError | None:
    problem = None if state.outcome is None else state.outcome.exception()
    return next((each for each in _chain(problem) if isinstance(each, HubBusyError)), None)


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes; huggingface_hub wraps those of threads."""
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__


def _cause(problem: BaseException | None) -> BaseException:
    """The exception of a chain that says most."""
    return next((each for each in _chain(problem) if _of_the_hub(each)), problem or RuntimeError("no reason"))


def _of_the_hub(problem: BaseException) -> bool:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(problem, HubBusyError | httpx2.TransportError | HfHubHTTPError | ConnectionError)


def _passes(problem: BaseException) -> bool:
    """Whether a failure is one that may be gone later."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for each in _chain(problem):
        if isinstance(each, OfflineModeIsEnabled | HubError):
            return False
        if isinstance(each, HubBusyError | httpx2.TransportError | ConnectionError | TimeoutError):
            return True
        if isinstance(each, HfHubHTTPError):
            return each.response is not None and each.response.status_code in (*_PASSING, *_CONFLICT)
    return False


def _advice(problem: BaseException, patience: Patience) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    cause = _cause(problem)
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to upload"
    if _passes(problem):
        return f"{one_line(cause)}, also after {patience.max_retries} tries more; the same command goes on from here"
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) and cause.response is not None else None
    if status == 401:
        return "the Hub does not take the token (401); set HF_TOKEN to one that may write (.env)"
    if status == 403:
        return "the token may not do this (403); it needs the right to write in this organisation"
    if status == 404:
        return f"there is no such place on the Hub (404): {one_line(cause)}"
    return one_line(cause) if _of_the_hub(cause) else f"{type(cause).__name__}: {one_line(cause)}"


def one_line(problem: BaseException) -> str:
    """What an exception says, in a line, without the token and the secrets of addresses."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return hide_token(without_secrets(text))


def hide_token(text: str) -> str:
    """A text without the token of this process."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "***") if token else text
