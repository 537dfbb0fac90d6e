"""Splits text into sentences and words."""

import re

_CODE = re.compile(r"``[^`]+``|`[^`]+`")
_WORD = re.compile(r"[^\W_](?:[\w'’.,:/=+*-]*[^\W_])?")
_END = re.compile(r"(?<=[.!?])[)\"'”]*\s+(?=[^a-z])")
_ABBREVIATED = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|etc|approx|no|fig|al|st)|\b[A-Z])\.$", re.IGNORECASE)


def words_of(text: str) -> list[str]:
    """Returns the words of a text; code in backquotes is one word."""
    return _WORD.findall(_CODE.sub(" code ", text))


def sentences(paragraph: str) -> list[str]:
    """Splits a paragraph into sentences; a full stop before a small letter or after `e.g.` does not end
    one."""
    parts: list[str] = []
    for part in _END.split(" ".join(paragraph.split())):
        if parts and _ABBREVIATED.search(parts[-1]):
            parts[-1] += " " + part
        elif part:
            parts.append(part)
    return parts
