"""lm-eval without what it says for its own command."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """No lines of lm-eval, which would stand among a run's own; no bars either, which would be drawn over its
    bar, and fill a log with what a terminal wipes away (`bars`: those that begin within are shown, as of a
    download). Nor does it start processes, which would be forks of one that holds a GPU. Bars that have begun
    go on."""
    from lm_eval.api import metrics

    log, draw = logging.getLogger("lm_eval"), tqdm.__init__

    def hidden(bar: tqdm, *given: Any, **named: Any) -> None:
        draw(bar, *given, **{**named, "disable": True})

    level, alone = log.level, os.environ.get("DISABLE_MULTIPROC")
    with ExitStack() as before:
        before.callback(log.setLevel, level)
        log.setLevel(logging.ERROR)
        before.callback(_set_environment, alone)
        _set_environment("1")
        before.callback(delattr, metrics, "print")
        setattr(metrics, "print", lambda *given: None)  # noqa: B010 - "bootstrapping for stddev"
        if not bars:
            before.callback(setattr, tqdm, "__init__", draw)
            setattr(tqdm, "__init__", hidden)  # noqa: B010 - of every library
        yield


def _set_environment(value: str | None) -> None:
    if value is None:
        del os.environ["DISABLE_MULTIPROC"]
    else:
        os.environ["DISABLE_MULTIPROC"] = value
