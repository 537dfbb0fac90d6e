"""Writes the HTML report of a cleaning job: dropped documents by reason, with examples of their text."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron.data.cleaning.accounts import Account

_MAX_TEXT_CHARS = 1200  # characters shown of a kept document
_INPUTS = 200


def write_page(path: Path, metadata: Mapping[str, Any], account: Account, retained_texts: Mapping[int, str]) -> None:
    """Write the HTML report of a job to `path`.

    retained_texts: {number of a document: its text}, for the documents kept instead of the duplicates shown
      as examples.
    """
    from jinja2 import Environment  # installed with torch

    text = files("megatron.data.cleaning").joinpath("page.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True).from_string(text)
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
            "samples": [
                {"text": sample.text, "kept": _excerpt(retained_texts, sample.duplicate_of)}
                for sample in account.samples[reason]
            ],
        }
        for reason, count in account.dropped.most_common()
    ]  # fmt: skip
    samples += [
        {
            "name": name, "anchor": name.replace(" ", "-"), "count": f"{len(group)} of them",
            "samples": [{"text": sample.text, "kept": None} for sample in group],
        }
        for name, group in account.samples.items() if name not in account.dropped
    ]  # fmt: skip
    return {
        "read": f"{account.read:,}", "kept": f"{sum(stay.values()):,}", "made": timing["finished"],
        "notes": metadata["notes"], "facts": facts, "rows": rows, "details": details, "samples": samples,
        "options": [(name, json.dumps(value, ensure_ascii=False)) for name, value in metadata["options"].items()],
        "inputs": [{**file, "bytes": f"{file['bytes']:,}"} for file in metadata["inputs"][:_INPUTS]],
    }  # fmt: skip


def _excerpt(texts: Mapping[int, str], document: int | None) -> str | None:
    return texts[document][:_MAX_TEXT_CHARS] if document is not None else None


def _row(name: str, documents: int, chars: int, read: int, anchor: str | None) -> dict[str, Any]:
    return {
        "name": name, "documents": f"{documents:,}", "share": f"{documents / read:.2%}", "chars": f"{chars:,}",
        "width": f"{100 * documents / read:.3f}", "anchor": anchor, "kept": anchor is None,
    }  # fmt: skip
