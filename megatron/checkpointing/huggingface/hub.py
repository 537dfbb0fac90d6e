"""Whether the Hub can be reached: asked once, so that nothing waits for retries on a machine without a
network."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS, _TRIES = 5.0, 2


@contextmanager
def find_in_hub_or_cache(log: Callable[[str], None]) -> Iterator[None]:
    """What is loaded within may come from the Hub; where that does not answer, or HF_HUB_OFFLINE is set, from
    its local cache alone, and what is not there fails at once. log: told that it does not answer.

    Any answer counts, also one of a proxy or a mirror (HF_ENDPOINT).
    """
    from huggingface_hub import constants

    problem = None if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if problem is None:
        yield
        return
    log(f"{constants.ENDPOINT} does not answer ({problem}): what is in its local cache is all there is")
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _unreachable(endpoint: str) -> str | None:
    """Why the Hub does not answer; None if it does. Goes the way that its own requests go, through proxies
    too."""
    from huggingface_hub.utils import get_session

    problem = None
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(1.0)
        try:
            get_session().head(endpoint, timeout=_SECONDS)
            return None
        except Exception as cause:  # of the transport, which is another library in each version
            problem = " ".join(str(cause).split()) or type(cause).__name__
    return problem
