"""Parameters that `make test` leaves out."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_more(names: Iterable[Any], *marked: Any, product: Collection[Any] = ()) -> list[Any]:
    """For `parametrize`: all names in their order; those of `more` and of `product` have the mark. Raises
    ValueError for another name in these, so that none is left there when a layout is renamed."""
    names = list(names)
    if unknown := {*marked, *product} - set(names):
        raise ValueError(f"not among {names}: {sorted(unknown)}")
    marks = {**dict.fromkeys(marked, pytest.mark.more), **dict.fromkeys(product, pytest.mark.product)}
    return [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]
