"""Checks once whether the Hub can be reached, so that nothing waits for retries without a network."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS, _TRIES = 5.0, 2


@contextmanager
def find_in_hub_or_cache(log: Callable[[str], None]) -> Iterator[None]:
    """Within the context, HuggingFace's libraries use only the local cache if the Hub does not answer.

    A file missing in the cache then fails at once, as with HF_HUB_OFFLINE. Any answer counts, also that of a
    proxy or a mirror (HF_ENDPOINT). log: called with a line of text if the Hub does not answer.
    """
    from huggingface_hub import constants

    problem = None if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if problem is None:
        yield
        return
    log(f"{constants.ENDPOINT} does not answer ({problem}): only files in its local cache can be used")
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _unreachable(endpoint: str) -> str | None:
    """Returns why the Hub at `endpoint` does not answer; None if it does. Uses the Hub library's proxies."""
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
