"""Renders samples as coloured text for a terminal, or as one self-contained HTML page."""

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.data.inspection.samples import KINDS, MASKED, PADDING, TRAINED, Decoder, DisplayedSample, text_spans
from megatron.data.inspection.statistics import DatasetStats, rewards_line, share
from megatron.pages import page_template

MOST_SPECIAL = 20  # special tokens that a page lists

CODES = {"trained": "\x1b[32m", "masked": "\x1b[2m", "padding": "\x1b[90m"}
SPECIAL, BOLD, END = "\x1b[7m", "\x1b[1m", "\x1b[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed: others could control the terminal


def visible(text: str) -> str:
    """Return the text with each control character replaced by its Unicode picture (U+2400 on) or U+FFFD."""
    return CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else "\ufffd", text)


def headline(sample: DisplayedSample) -> str:
    """Return a sample's title line, such as `document 3 · chosen · 174 tokens · 54 trained, 120 masked ·
    reward 0.5`."""
    counts = [f"{sample.count(kind)} {KINDS[kind]}" for kind in (TRAINED, MASKED, PADDING) if sample.count(kind)]
    tokens = sum(len(part.tokens) for part in sample.parts)
    items = [sample.title, sample.name, f"{tokens} tokens", ", ".join(counts)]
    if sample.reward is not None:
        items.append(f"reward {sample.reward:g}")
    return " · ".join(item for item in items if item)


def positions(start: int, count: int) -> str:
    return f"position {start}" if count == 1 else f"positions {start}–{start + count - 1}"


def terminal(sample: DisplayedSample, tokenizer: Decoder, colour: bool) -> str:
    """Return a sample as text for a terminal. Without colour, trained text is put between « and »."""
    bold, end = (BOLD, END) if colour else ("", "")
    lines = [f"{bold}━━ {headline(sample)}{end}"]
    for part in sample.parts:
        lines.append(f"{bold}── {part.name}, {positions(0, len(part.tokens))}{end}")
        texts = []
        for span in text_spans(part, tokenizer):
            text = visible(span.text) or f"({span.tokens} padding tokens)"
            if colour:
                # The colour is set again on every line, because pagers forget it at the end of a line
                code = CODES[span.kind] + (SPECIAL if span.special else "")
                texts.append("\n".join(f"{code}{line}{END}" if line else "" for line in text.split("\n")))
            else:
                texts.append(f"«{text}»" if span.kind == "trained" else text)
        lines.append("".join(texts))
    return "\n".join(lines) + "\n"


def page(
    title: str,
    groups: Iterable[Sequence[DisplayedSample]],
    tokenizer: Decoder,
    stats: Sequence[DatasetStats],
    picture: bytes | None,
) -> str:
    """Return an HTML page of samples and statistics.

    groups: samples to show side by side. picture: a PNG, or None.
    """
    return str(page_template("megatron.data.inspection").render(
        title=title, stats=[_stats(set_stats) for set_stats in stats],
        picture=None if picture is None else base64.b64encode(picture).decode(),
        groups=[[_sample(sample, tokenizer) for sample in group] for group in groups],
    ))  # fmt: skip


def _sample(sample: DisplayedSample, tokenizer: Decoder) -> dict[str, Any]:
    parts = []
    for part in sample.parts:
        spans = [
            {
                "kind": f"{span.kind} special" if span.special else span.kind,
                "hint": f"{positions(span.start, span.tokens)}, {span.kind}",
                "text": visible(span.text) or f"{span.tokens} padding tokens",
            }
            for span in text_spans(part, tokenizer)
        ]
        parts.append({"caption": f"{part.name} · {positions(0, len(part.tokens))}", "spans": spans})
    return {"headline": headline(sample), "parts": parts}


def _stats(stats: DatasetStats) -> dict[str, Any]:
    """Return the variables of the template for the statistics of a dataset: its name, facts and tables."""
    facts = {
        "documents": f"{stats.documents:,}",
        "tokens": f"{stats.tokens:,}",
        "mean length": f"{stats.mean:,.1f}",
        "empty": f"{stats.empty:,}",
        "exact duplicates": f"{stats.duplicates:,} ({share(stats.duplicates, stats.documents)})",
    }
    if stats.trained is not None:
        facts |= {"tokens trained": f"{stats.trained:.1%}", "documents not trained": f"{stats.untrained_documents:,}"}
    if stats.rewards is not None:
        facts["rewards"] = rewards_line(stats.rewards)
    lengths = ([f"p{p}" for p in stats.percentiles], [[f"{value:,}" for value in stats.percentiles.values()]])
    tables = [("Lengths of documents, in tokens", *lengths)]
    special = sorted(((name, count) for name, count in stats.special.items() if count), key=lambda item: -item[1])
    if special:
        title = "Special tokens"
        if len(special) > MOST_SPECIAL:
            title += f": the {MOST_SPECIAL} most frequent of {len(special)} that occur"
        tables.append((title, ["token", "count"], [[name, f"{count:,}"] for name, count in special[:MOST_SPECIAL]]))
    if stats.packing:
        shares = [
            [f"{row.length:,}", *(f"{value:.1%}" for value in (row.fit, row.unpacked, row.next_fit, row.best_fit,
                                                              row.packed_cuts))]
            for row in stats.packing
        ]  # fmt: skip
        names = ["seq_length", "documents that fit", "unpacked", "pack_until_overflow", "best_fit", "cut by packed"]
        tables.append(("Rows filled with text, by the way of packing", names, shares))
    return {"name": stats.name, "facts": list(facts.items()), "tables": tables}
