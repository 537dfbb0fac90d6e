"""Parameters that only `make test-more` takes."""

from collections.abc import Iterable
from typing import Any

import pytest


def with_more(names: Iterable[str], *more: str) -> list[Any]:
    """For `parametrize`: all names in their order; those of `more` have the mark. Raises ValueError for
    another name in `more`, so that none is left there when a layout is renamed."""
    names = list(names)
    if unknown := set(more) - set(names):
        raise ValueError(f"not among {names}: {sorted(unknown)}")
    return [pytest.param(name, marks=pytest.mark.more) if name in more else name for name in names]
