"""Counts relative words (what, which, ...) and long sentences in Markdown pages. Code blocks are left out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.lint.finding import Finding
from tools.lint.sentences import sentences, words_of

MOST_WORDS = 35
RELATIVE_WORDS = frozenset(["what", "that", "which", "whose", "where", "whom"])
_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_COMMENT = re.compile(r"<!--.*?-->|</?[A-Za-z][^>]*>", re.DOTALL)
_BLOCK_START = re.compile(r"^\s*(?:[-*+] |\d+[.)] |#+ |> ?|\[\^[^\]]+\]: ?)")
_CELL_EDGE = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Page:
    """Counts for one page: all words, relative words (which, that, ...), and findings of sentences that are
    too long."""

    words: int
    relative: int
    long: list[Finding]

    @property
    def relative_per_100(self) -> float:
        return round(100 * self.relative / self.words, 1) if self.words else 0.0


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each paragraph, list item, heading and table cell; skips code and comments."""
    text = _COMMENT.sub(lambda comment: "\n" * comment.group().count("\n"), text)
    fence = None
    begin, lines = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        edge = _FENCE.match(line)
        is_row = line.lstrip().startswith("|")
        if edge or fence or is_row or not line.strip() or _BLOCK_START.match(line):
            if lines:
                yield begin, " ".join(lines)
            lines = []
        if edge:
            fence = None if edge[1] == fence else fence or edge[1]
        elif fence or not line.strip():
            continue
        elif is_row:
            yield from ((number, cell.strip()) for cell in _CELL_EDGE.split(line) if cell.strip(" -:"))
        else:
            begin = begin if lines else number
            lines.append(_BLOCK_START.sub("", line).strip())


def read_page(path: str, text: str) -> Page:
    words = relative = 0
    too_long = []
    for line, block in blocks(text):
        for sentence in sentences(_LINK.sub(r"\1", block)):
            spoken = words_of(sentence)
            words += len(spoken)
            relative += sum(word.lower() in RELATIVE_WORDS for word in spoken)
            if len(spoken) > MOST_WORDS:
                opening = " ".join(sentence.split()[:8]) + " ..."
                too_long.append(Finding(path, line, opening, f"sentence of {len(spoken)} words"))
    return Page(words, relative, too_long)
