"""Reads a JSON array as a stream of its elements, without loading the full array into memory."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

from megatron.data.errors import DataError
from megatron.data.preprocessing.shards import BOM, Record

READ_BYTES = 1 << 20
BLANKS = " \t\r\n"
STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)  # of JSON: strings, brackets and commas


def begins_array(content: bytes) -> bool:
    """Return whether the first bytes of a file begin a JSON array."""
    return content.removeprefix(BOM).lstrip()[:1] == b"["


class _ElementReader:
    """Finds the elements of one JSON array in a stream; only a window of the text is in memory."""

    def __init__(self, stream: IO[bytes], source: str):
        self.stream, self.source = stream, source
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        # The scanner only has to find the end of an element; InputRow.value parses and checks its numbers
        self.scanner = json.JSONDecoder(parse_int=len, parse_float=len)
        self.text, self.at_end = "", False

    def read_more(self) -> None:
        """Read more of the stream into the window: at least READ_BYTES, and as many bytes as the window
        has characters."""
        block = self.stream.read(max(len(self.text), READ_BYTES))
        self.text, self.at_end = self.text + self.decoder.decode(block, final=not block), not block

    def skip_blanks(self, position: int) -> int:
        """Return the first position at or after `position` that is not white space, or the end of the
        text."""
        while True:
            while position < len(self.text) and self.text[position] in BLANKS:
                position += 1
            if position < len(self.text) or self.at_end:
                return position
            self.read_more()

    def element_end(self, position: int, number: int) -> tuple[int, str | None]:
        """Return (end of the element at `position`, None or the reason why the element is bad).

        It reads more of the stream if needed. Raises DataError for a bad element whose end cannot be found.
        """
        while True:
            end, reason, may_be_incomplete = self._scan(position)
            if end < 0 and (self.at_end or not may_be_incomplete):
                end = _balanced_end(self.text, position)
            if end >= 0:
                return end, reason
            if self.at_end:
                raise DataError(f"{self.source}: element {number}: {reason}")
            self.read_more()

    def _scan(self, position: int) -> tuple[int, str | None, bool]:
        """Return (end of the element at `position` or -1, why it cannot be parsed or None, whether more
        text may help)."""
        try:
            return self.scanner.raw_decode(self.text, position)[1], None, False
        except RecursionError as problem:
            return -1, f"not usable JSON ({problem})", False
        except json.JSONDecodeError as problem:
            # Near the end of the window, or inside a string, more text may complete the element
            near_end = problem.pos >= len(self.text) - 16
            return -1, f"not valid JSON ({problem.msg})", near_end or problem.msg.startswith("Unterminated string")

    def drop(self, position: int) -> int:
        """Drop the text before `position` if it is long; return `position` in the remaining text."""
        if position <= READ_BYTES:
            return position
        self.text = self.text[position:]
        return 0


def array_elements(stream: IO[bytes], source: str) -> Iterator[Record]:
    """Yield the elements of one JSON array, as text. Raises DataError for an array that cannot be split."""
    reader, number = _ElementReader(stream, source), 0
    position = reader.skip_blanks(0) + 1  # after the opening bracket
    while True:
        position = reader.skip_blanks(position)
        if reader.text[position : position + 1] == "]":
            return
        end, reason = reader.element_end(position, number)
        next_position = reader.skip_blanks(end)
        if reader.text[next_position : next_position + 1] not in (",", "]"):
            raise DataError(f"{source}: expected a comma or ] after element {number} (the first is 0); mend the JSON")
        yield number, reader.text[position:end].encode(), reason
        position, number = reader.drop(next_position + (reader.text[next_position] == ",")), number + 1


def _balanced_end(text: str, position: int) -> int:
    """Return the end of the array element at `position` by counting brackets outside strings; -1 if the
    text ends first."""
    depth = 0
    for match in STRUCTURE.finditer(text, position):
        mark = match[0]
        if mark == '"':  # the quote of a string that does not end
            return -1
        if depth <= 0 and mark in (",", "]"):
            return match.start()
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
    return -1
