"""Reads whole numbers as people and other programs write them."""


def parse_integer(text: str) -> int | None:
    """Returns the number that a text of 1 to 18 ASCII digits writes; None for any other text.

    `str.isdecimal` followed by `int` would also take digits of other scripts, and would fail at thousands of
    digits, which Python refuses to read.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
