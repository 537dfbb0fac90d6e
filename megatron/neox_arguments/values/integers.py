"""Reads numbers as people and other programs write them."""

import math
from typing import Any


def parse_integer(text: str) -> int | None:
    """Returns the number that a text of 1 to 18 ASCII digits writes; None for any other text.

    `str.isdecimal` followed by `int` would also take digits of other scripts, and would fail at thousands of
    digits, which Python refuses to read.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def finite_float(value: Any) -> float | None:
    """Returns a number of JSON or YAML as a float; None for booleans, NaN, infinity, and other types.

    Python reads an integer of 400 digits, which is infinite as a float: `float` and `math.isfinite` raise
    OverflowError for it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
