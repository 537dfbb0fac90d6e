"""Where an answer stands in a text: in a box, between tags, behind `####`, or in a fenced block."""

import re
from collections.abc import Collection

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def marked_answer(text: str) -> str | None:
    r"""The last `\boxed{...}`, else the last `<answer>...</answer>`, else what follows the last `####`; None
    where a text has none of them."""
    if (boxed := _boxed(text)) is not None:
        return boxed.strip()
    if (tagged := _tagged(text)) is not None:
        return tagged.strip()
    before, mark, after = text.rpartition("####")
    return after.strip() if mark else None


def answer(text: str) -> str:
    """The marked answer, else all of the text."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def fenced_block(text: str, languages: Collection[str]) -> str | None:
    """The inside of the last block between lines of ``` whose language is one of these or not given."""
    blocks = [inside for language, inside in _FENCE.findall(text) if language.lower() in {"", *languages}]
    return blocks[-1] if blocks else None


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    """The inside of the last box that is closed, found in one pass: texts may be nothing but boxes."""
    last, inside, opened = -1, None, []
    for brace in re.finditer(r"(\\boxed)?\{|\}", text):
        if brace.group() != "}":
            opened.append((brace.end(), brace[1] is not None))
        elif opened:
            start, is_box = opened.pop()
            if is_box and start > last:
                last, inside = start, text[start : brace.start()]
    return inside
