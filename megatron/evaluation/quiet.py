"""Silences lm-eval's own output."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Silences lm-eval's log lines and progress bars within the context, and keeps lm-eval from starting
    processes.

    Its bars would be drawn over the run's own bar and fill the log. Its processes would be forks of a process
    that uses a GPU.

    bars: True: new progress bars are shown, such as a download's. Bars that have begun are shown in any case.
    """
    from lm_eval.api import metrics

    log, draw = logging.getLogger("lm_eval"), tqdm.__init__

    def hidden(bar: tqdm, *arguments: Any, **keywords: Any) -> None:
        draw(bar, *arguments, **{**keywords, "disable": True})

    level, multiprocessing = log.level, os.environ.get("DISABLE_MULTIPROC")
    with ExitStack() as restore:
        restore.callback(log.setLevel, level)
        log.setLevel(logging.ERROR)
        restore.callback(_set_environment, multiprocessing)
        _set_environment("1")
        restore.callback(delattr, metrics, "print")
        setattr(metrics, "print", lambda *arguments: None)  # noqa: B010 - "bootstrapping for stddev"
        if not bars:
            restore.callback(setattr, tqdm, "__init__", draw)
            setattr(tqdm, "__init__", hidden)  # noqa: B010 - of every library
        yield


def _set_environment(value: str | None) -> None:
    if value is None:
        del os.environ["DISABLE_MULTIPROC"]
    else:
        os.environ["DISABLE_MULTIPROC"] = value
