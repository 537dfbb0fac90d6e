"""Exact duplicates of documents, paragraphs and lines: what is equal once runs of whitespace are one space.
The first stays."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron.data.cleaning.sorted_runs import document_numbers, groups, merged
from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

SCOPES = ("document", "paragraph", "line")
_SEPARATOR = {"paragraph": re.compile(r"(\n\s*\n)"), "line": re.compile(r"(\n)")}
_HASH = np.dtype([("key", "<u8"), ("rest", "<u8"), ("document", "<u8"), ("place", "<u4")])
LATER = np.dtype([("document", "<u8"), ("place", "<u4"), ("first", "<u8")])
"""A piece that has stood before: of which document, at which place in it, and where it stood."""


def pieces(text: str, scope: str) -> list[str]:
    """A text as pieces of a scope and what stands between them, in turn: whole pieces at even places."""
    return [text] if scope == "document" else _SEPARATOR[scope].split(text)


def hash_records(
    texts: Iterable[tuple[int, str]], part: int, scope: str, min_chars: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the pieces of texts of a part, by their rows: records of those that have not stood before in it, for
    `sorted_runs.write_run`, and of the others, which are LATER whatever stands in other parts. Paragraphs and
    lines of fewer than min_chars characters are left out."""
    digest = import_optional("xxhash", DataError("exact duplicates: pip install 'neox[clean]'")).xxh3_128_intdigest
    seen: dict[int, tuple[int, int]] = {}
    later: list[tuple[int, int, int]] = []
    for row, text in texts:
        for place, piece in enumerate(pieces(text, scope)[::2]):
            words = " ".join(piece.split())
            if scope == "document" or len(words) >= min_chars:
                first = seen.setdefault(digest(words.encode("utf-8", "surrogatepass")), (row, place))
                if first != (row, place):
                    later.append((row, place, first[0]))
    records, again = np.empty(len(seen), _HASH), np.empty(len(later), LATER)
    if seen:
        rows, places = zip(*seen.values(), strict=True)
        records["key"] = [value >> 64 for value in seen]
        records["rest"] = [value & 0xFFFFFFFFFFFFFFFF for value in seen]
        records["document"], records["place"] = document_numbers(part, np.array(rows)), places
    if later:
        rows, places, firsts = zip(*later, strict=True)
        again["document"], again["place"] = document_numbers(part, np.array(rows)), places
        again["first"] = document_numbers(part, np.array(firsts))
    return records, again


def later_ones(paths: Sequence[Path]) -> Iterator[np.ndarray]:
    """Of the records of runs in the order of their parts, those whose hash has stood in an earlier part, as
    LATER."""
    for piece in merged(paths):
        piece = piece[np.lexsort((piece["rest"], piece["key"]))]  # stable: documents stay in their order
        begins, heads = groups(piece["key"], piece["rest"])
        later = np.empty(int((~begins).sum()), LATER)
        later["document"], later["place"] = piece["document"][~begins], piece["place"][~begins]
        later["first"] = piece["document"][heads[~begins]]
        yield later


def without(text: str, scope: str, places: Sequence[int]) -> str:
    """A text without the pieces at these places, each with the separator behind it."""
    parts = pieces(text, scope)
    left_out = set(places)
    kept = [
        piece + (parts[2 * place + 1] if 2 * place + 1 < len(parts) else "")
        for place, piece in enumerate(parts[::2])
        if place not in left_out
    ]
    return "".join(kept).strip("\n")


def without_both(text: str, places: Mapping[str, Sequence[int]]) -> str:
    """A text without these paragraphs and these lines, both counted in the whole of it."""
    gone_lines, gone_paragraphs = set(places["line"]), set(places["paragraph"])
    kept, line, parts = [], 0, pieces(text, "paragraph")
    for place, paragraph in enumerate(parts[::2]):
        separator = parts[2 * place + 1] if 2 * place + 1 < len(parts) else ""
        lines = paragraph.split("\n")
        if place not in gone_paragraphs:
            left = [one for i, one in enumerate(lines) if line + i not in gone_lines]
            if left:
                kept.append("\n".join(left) + separator)
        line += len(lines) - 1 + separator.count("\n")
    return "".join(kept).strip("\n")
