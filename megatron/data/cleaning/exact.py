"""Finds exact duplicates of documents, paragraphs and lines, and removes repeated paragraphs and lines.

Any run of whitespace compares as one space. The first occurrence is kept.
"""

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
REPEAT = np.dtype([("document", "<u8"), ("place", "<u4"), ("first", "<u8")])
"""The dtype of a repeated piece: its document, its index in it, and the document of the first occurrence."""


def pieces(text: str, scope: str) -> list[str]:
    """Split a text by `scope` (document, paragraph or line): even items are the pieces, odd items the
    separators."""
    return [text] if scope == "document" else _SEPARATOR[scope].split(text)


def hash_records(
    texts: Iterable[tuple[int, str]], part: int, scope: str, min_chars: int
) -> tuple[np.ndarray, np.ndarray]:
    """Hash the pieces of a part's texts; return (first occurrences, repeats within the part).

    texts: (row in the part, text). scope: document, paragraph or line. First occurrences are records for
      `sorted_runs.write_run`; repeats are REPEAT records. Paragraphs and lines of fewer than min_chars
      characters are skipped.
    """
    digest = import_optional("xxhash", DataError("--exact needs xxhash: pip install 'neox[clean]'")).xxh3_128_intdigest
    first_places: dict[int, tuple[int, int]] = {}
    repeats: list[tuple[int, int, int]] = []
    for row, text in texts:
        for place, piece in enumerate(pieces(text, scope)[::2]):
            words = " ".join(piece.split())
            if scope == "document" or len(words) >= min_chars:
                origin = first_places.setdefault(digest(words.encode("utf-8", "surrogatepass")), (row, place))
                if origin != (row, place):
                    repeats.append((row, place, origin[0]))
    records, repeat_records = np.empty(len(first_places), _HASH), np.empty(len(repeats), REPEAT)
    if first_places:
        rows, places = zip(*first_places.values(), strict=True)
        records["key"] = [value >> 64 for value in first_places]
        records["rest"] = [value & 0xFFFFFFFFFFFFFFFF for value in first_places]
        records["document"], records["place"] = document_numbers(part, np.array(rows)), places
    if repeats:
        rows, places, origins = zip(*repeats, strict=True)
        repeat_records["document"], repeat_records["place"] = document_numbers(part, np.array(rows)), places
        repeat_records["first"] = document_numbers(part, np.array(origins))
    return records, repeat_records


def repeats_across_parts(paths: Sequence[Path]) -> Iterator[np.ndarray]:
    """Yield REPEAT records of the pieces whose hash occurs in an earlier part.

    paths: the files of first occurrences (from `hash_records`) of all parts, in order.
    """
    for piece in merged(paths):
        piece = piece[np.lexsort((piece["rest"], piece["key"]))]  # stable: documents stay in their order
        begins, heads = groups(piece["key"], piece["rest"])
        repeats = np.empty(int((~begins).sum()), REPEAT)
        repeats["document"], repeats["place"] = piece["document"][~begins], piece["place"][~begins]
        repeats["first"] = piece["document"][heads[~begins]]
        yield repeats


def remove_pieces(text: str, scope: str, places: Sequence[int]) -> str:
    """Return `text` without the paragraphs or lines (`scope`) at indices `places`, nor the separators after
    them."""
    parts = pieces(text, scope)
    left_out = set(places)
    retained = [
        piece + (parts[2 * place + 1] if 2 * place + 1 < len(parts) else "")
        for place, piece in enumerate(parts[::2])
        if place not in left_out
    ]
    return "".join(retained).strip("\n")


def remove_paragraphs_and_lines(text: str, places: Mapping[str, Sequence[int]]) -> str:
    """Return `text` without some paragraphs and lines.

    places: {"paragraph": indices, "line": indices} of what to remove, counted in the full text.
    """
    gone_lines, gone_paragraphs = set(places["line"]), set(places["paragraph"])
    retained, first_line, parts = [], 0, pieces(text, "paragraph")
    for place, paragraph in enumerate(parts[::2]):
        separator = parts[2 * place + 1] if 2 * place + 1 < len(parts) else ""
        lines = paragraph.split("\n")
        if place not in gone_paragraphs:
            remaining = [line for i, line in enumerate(lines) if first_line + i not in gone_lines]
            if remaining:
                retained.append("\n".join(remaining) + separator)
        first_line += len(lines) - 1 + separator.count("\n")
    return "".join(retained).strip("\n")
