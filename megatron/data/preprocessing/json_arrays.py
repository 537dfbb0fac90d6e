"""One JSON array as a stream of its elements, without holding the array."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

from megatron.data.errors import DataError
from megatron.data.preprocessing.shards import BOM, Record

READ_BYTES = 1 << 20
BLANKS = " \t\r\n"
STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)  # of JSON: strings, and what nests


def begins_array(content: bytes) -> bool:
    """Whether the first bytes of a file are those of a JSON array."""
    return content.removeprefix(BOM).lstrip()[:1] == b"["


class _ElementReader:
    """A window of the text of a stream in which the elements of one JSON array are found."""

    def __init__(self, stream: IO[bytes], source: str):
        self.stream, self.source = stream, source
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        # Where an element ends is all that is wanted of the scanner; InputRow.value judges its numbers
        self.scanner = json.JSONDecoder(parse_int=len, parse_float=len)
        self.text, self.ended = "", False

    def read_more(self) -> None:
        """Lengthen the window by as much as it holds, at least READ_BYTES."""
        block = self.stream.read(max(len(self.text), READ_BYTES))
        self.text, self.ended = self.text + self.decoder.decode(block, final=not block), not block

    def skip_blanks(self, position: int) -> int:
        """The first place from `position` on that is no white space, or the end of the text."""
        while True:
            while position < len(self.text) and self.text[position] in BLANKS:
                position += 1
            if position < len(self.text) or self.ended:
                return position
            self.read_more()

    def element_end(self, position: int, number: int) -> tuple[int, str | None]:
        """(where the element that begins at `position` ends, why it is bad or None), reading on as far as
        needed.

        Raises DataError for a bad element without an end.
        """
        while True:
            end, reason, may_be_cut = self._scan(position)
            if end < 0 and (self.ended or not may_be_cut):
                end = _balanced_end(self.text, position)
            if end >= 0:
                return end, reason
            if self.ended:
                raise DataError(f"{self.source}: element {number}: {reason}")
            self.read_more()

    def _scan(self, position: int) -> tuple[int, str | None, bool]:
        """(end of the element at `position` or -1, why it cannot be read, whether more text may mend
        that)."""
        try:
            return self.scanner.raw_decode(self.text, position)[1], None, False
        except RecursionError as problem:
            return -1, f"not usable JSON ({problem})", False
        except json.JSONDecodeError as problem:
            # Near the end of what was read so far, or inside a string, the rest may mend it
            near_end = problem.pos >= len(self.text) - 16
            return -1, f"not valid JSON ({problem.msg})", near_end or problem.msg.startswith("Unterminated string")

    def drop(self, position: int) -> int:
        """Forget the text before `position` once that is much; gives the position in what is left."""
        if position <= READ_BYTES:
            return position
        self.text = self.text[position:]
        return 0


def array_elements(stream: IO[bytes], source: str) -> Iterator[Record]:
    """The elements of one JSON array, as text. Raises DataError for an array that cannot be cut into
    elements."""
    reader, number = _ElementReader(stream, source), 0
    position = reader.skip_blanks(0) + 1  # behind the bracket
    while True:
        position = reader.skip_blanks(position)
        if reader.text[position : position + 1] == "]":
            return
        end, reason = reader.element_end(position, number)
        after = reader.skip_blanks(end)
        if reader.text[after : after + 1] not in (",", "]"):
            raise DataError(f"{source}: element {number}: neither a comma nor the end of the array after it")
        yield number, reader.text[position:end].encode(), reason
        position, number = reader.drop(after + (reader.text[after] == ",")), number + 1


def _balanced_end(text: str, position: int) -> int:
    """Where the element of an array that begins at `position` ends, judged by strings and brackets; -1: not
    in text."""
    depth = 0
    for match in STRUCTURE.finditer(text, position):
        mark = match[0]
        if mark == '"':  # of a string without an end
            return -1
        if depth <= 0 and mark in (",", "]"):
            return match.start()
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
    return -1
