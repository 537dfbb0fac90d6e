"""Finds the answer in a text: in a box, between tags, after `####`, or in a fenced block."""

import re
from collections.abc import Collection

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def marked_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, else of the last `<answer>...</answer>`.

    Without these it returns the text after the last `####`; without any mark None."""
    if (boxed := _boxed(text)) is not None:
        return boxed.strip()
    if (tagged := _tagged(text)) is not None:
        return tagged.strip()
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def answer(text: str) -> str:
    """Returns the marked answer, else the full text."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def fenced_block(text: str, languages: Collection[str]) -> str | None:
    """Returns the content of the last block fenced by ``` whose language is in `languages` or not given."""
    blocks = [content for language, content in _FENCE.findall(text) if language.lower() in {"", *languages}]
    return blocks[-1] if blocks else None


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    """Returns the content of the `\\boxed{...}` that opens last and is closed; None if there is none."""
    last, content, opened = -1, None, []
    for brace in re.finditer(r"(\\boxed)?\{|\}", text):
        if brace.group() != "}":
            opened.append((brace.end(), brace[1] is not None))
        elif opened:
            start, is_box = opened.pop()
            if is_box and start > last:
                last, content = start, text[start : brace.start()]
    return content
