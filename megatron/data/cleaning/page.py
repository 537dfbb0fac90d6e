"""Writes the HTML report of a cleaning job: dropped documents by reason, with examples of their text."""

import json
import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from megatron.data.cleaning.accounts import Account
from megatron.pages import page_template

_MAX_TEXT_CHARS = 1200  # characters shown of a kept document
_INPUTS = 200


def write_page(path: Path, metadata: Mapping[str, Any], account: Account, retained_texts: Mapping[int, str]) -> None:
    """Write the HTML report of a job to `path`.

    retained_texts: {number of a document: its text}, for the documents kept instead of the duplicates shown
      as examples.
    """
    page = page_template("megatron.data.cleaning")
    path.write_text(page.render(**_values(metadata, account, retained_texts)), encoding="utf-8")


def _values(metadata: Mapping[str, Any], account: Account, retained_texts: Mapping[int, str]) -> dict[str, Any]:
    stay = {name: count for name, count in metadata["document_counts"].items() if count}
    timing, read = metadata["timing"], max(account.read, 1)
    facts = [
        ("documents read", f"{account.read:,}"), ("characters read", f"{account.chars:,}"),
        *((f"documents in {name}", f"{count:,} ({count / read:.2%})") for name, count in stay.items()),
        *((f"characters in {name}", f"{metadata['chars'][name]:,}") for name in stay),
        ("seconds", f"{timing['seconds']:,.1f}"),
        ("documents a second", f"{account.read / max(timing['seconds'], 1e-9):,.0f}"),
    ]  # fmt: skip
    if "minhash" in metadata:
        facts.append(("clusters of near-duplicates", f"{metadata['minhash']['clusters']:,}"))
    anchors = {reason: f"reason-{number}" for number, reason in enumerate(account.dropped)}
    rows = [
        _row(reason, count, account.dropped_chars[reason], read, anchors[reason])
        for reason, count in account.dropped.most_common()
    ]
    rows += [_row(f"stays in {name}", count, metadata["chars"][name], read, None) for name, count in stay.items()]
    details = [
        (name.replace("_", " "), ", ".join(f"{key} {count:,}" for key, count in counts.most_common()))
        for name, counts in account.details.items() if counts
    ]  # fmt: skip
    if "minhash" in metadata:
        sizes = ", ".join(f"{count:,} of {size}" for size, count in metadata["minhash"]["sizes"].items())
        details.append(("clusters of near-duplicates by documents", sizes or "none"))
    samples = [
        {
            "name": reason, "anchor": anchors[reason], "count": f"{count:,}",
            "has_pairs": any(sample.duplicate_of is not None for sample in account.samples[reason]),
            "samples": [
                _pair(sample.text, _excerpt(retained_texts, sample.duplicate_of)) for sample in account.samples[reason]
            ],
        }
        for reason, count in account.dropped.most_common()
    ]  # fmt: skip
    samples += [
        {
            "name": name, "anchor": name.replace(" ", "-"), "count": f"{len(group)} of them",
            "has_pairs": False, "samples": [_pair(sample.text, None) for sample in group],
        }
        for name, group in account.samples.items() if name not in account.dropped
    ]  # fmt: skip
    return {
        "read": f"{account.read:,}", "kept": f"{sum(stay.values()):,}", "made": timing["finished"],
        "notes": metadata["notes"], "facts": facts, "rows": rows, "details": details, "samples": samples,
        "options": [(name, json.dumps(value, ensure_ascii=False)) for name, value in metadata["options"].items()],
        "inputs": [{**file, "bytes": f"{file['bytes']:,}"} for file in metadata["inputs"][:_INPUTS]],
    }  # fmt: skip


Pieces = list[tuple[str, bool]]
"""A text in pieces, each with whether the other text of its pair lacks it."""


def _pair(text: str, retained: str | None) -> dict[str, Pieces | None]:
    """Returns a dropped text, and the text that was kept in its place, with the words that differ marked."""
    if retained is None:
        return {"text": [(text, False)], "kept": None}
    word_lists = [re.findall(r"\s+|\S+", part) for part in (text, retained)]
    pieces: tuple[Pieces, Pieces] = [], []
    for kind, *ends in SequenceMatcher(None, word_lists[0], word_lists[1], autojunk=False).get_opcodes():
        for words, result, (start, end) in zip(word_lists, pieces, (ends[:2], ends[2:]), strict=True):
            if end > start:
                result.append(("".join(words[start:end]), kind != "equal"))
    return {"text": pieces[0], "kept": pieces[1]}


def _excerpt(texts: Mapping[int, str], document: int | None) -> str | None:
    return texts[document][:_MAX_TEXT_CHARS] if document is not None else None


def _row(name: str, documents: int, chars: int, read: int, anchor: str | None) -> dict[str, Any]:
    return {
        "name": name, "documents": f"{documents:,}", "share": f"{documents / read:.2%}", "chars": f"{chars:,}",
        "width": f"{100 * documents / read:.3f}", "anchor": anchor, "kept": anchor is None,
    }  # fmt: skip
