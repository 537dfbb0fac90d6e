"""Renders samples as coloured text for a terminal, or as one self-contained HTML page."""

import base64
import html
import re
from collections.abc import Iterable, Iterator, Sequence

from megatron.data.inspection.samples import KINDS, MASKED, PADDING, TRAINED, Decoder, DisplayedSample, text_spans
from megatron.data.inspection.statistics import DatasetStats, rewards_line, share

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


LEGEND = """<p class="legend"><span class="trained">trained</span> the model learns to write it ·
<span class="masked">masked</span> it only reads it · <span class="padding">padding</span> neither ·
<span class="masked special">special</span> a token that is not text · hover a span for its positions</p>"""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --line: #d9dde3; --ink: #1c2430; --quiet: #6b7686;
  --trained: #d3f2dc; --trained-ink: #0b4a24; --special: #34506e; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --line: #323b47; --ink: #e4e9f0;
  --quiet: #8e9aab; --trained: #164a2b; --trained-ink: #c6f3d5; --special: #8fb3d9; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: .95rem; margin: 0 0 .5rem; }
.legend, header { color: var(--quiet); font-size: .85rem; }
.group { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; margin: 1rem 0; }
article { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; min-width: 0; }
section { border-top: 2px solid var(--line); padding-top: .3rem; margin-top: .6rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0 0; font: 13px/1.6 ui-monospace, monospace; }
.trained { background-color: var(--trained); color: var(--trained-ink); border-radius: .2rem; }
.masked { color: var(--quiet); }
.padding { color: var(--quiet); border: 1px dashed var(--line); padding: 0 .4rem; }
.special { border: 1px solid var(--special); border-radius: .3rem; padding: 0 .2rem; font-weight: 600; }
table { border-collapse: collapse; margin: .8rem 0; } img { max-width: 100%; background: #fff; border-radius: .4rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem; text-align: right; } th { font-weight: 600; }
"""


def page(
    title: str,
    groups: Iterable[Sequence[DisplayedSample]],
    tokenizer: Decoder,
    stats: Sequence[DatasetStats],
    picture: bytes | None,
) -> Iterator[str]:
    """Yield an HTML page of samples and statistics, piece by piece.

    groups: samples to show side by side. picture: a PNG, or None.
    """
    name = html.escape(title)
    yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
    yield f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n{LEGEND}\n"
    for set_stats in stats:
        yield from _stats(set_stats)
    if picture is not None:
        data = base64.b64encode(picture).decode()
        yield f'<p><img alt="histogram of document lengths" src="data:image/png;base64,{data}"></p>\n'
    for group in groups:
        yield '<div class="group">\n'
        for sample in group:
            yield f"<article><h2>{html.escape(headline(sample))}</h2>\n"
            for part in sample.parts:
                caption = f"{part.name} · {positions(0, len(part.tokens))}"
                yield f'<section><header>{html.escape(caption)}</header><p class="text">'
                for span in text_spans(part, tokenizer):
                    text = html.escape(visible(span.text)) or f"{span.tokens} padding tokens"
                    kind = f"{span.kind} special" if span.special else span.kind
                    hint = f"{positions(span.start, span.tokens)}, {span.kind}"
                    yield f'<span class="{kind}" title="{hint}">{text}</span>'
                yield "</p></section>\n"
            yield "</article>\n"
        yield "</div>\n"
    yield "</body></html>\n"


def _stats(stats: DatasetStats) -> Iterator[str]:
    yield f"<article><h2>{html.escape(stats.name)}</h2>\n"
    facts = {
        "documents": f"{stats.documents}",
        "tokens": f"{stats.tokens}",
        "mean length": f"{stats.mean:.1f}",
        "empty": f"{stats.empty}",
        "exact duplicates": f"{stats.duplicates} ({share(stats.duplicates, stats.documents)})",
    }
    if stats.trained is not None:
        facts |= {"tokens trained": f"{stats.trained:.1%}", "documents not trained": f"{stats.untrained_documents}"}
    if stats.rewards is not None:
        facts["rewards"] = rewards_line(stats.rewards)
    yield _table(list(facts), [list(facts.values())])
    yield _table([f"p{p}" for p in stats.percentiles], [[str(value) for value in stats.percentiles.values()]])
    if stats.special:
        yield _table(list(stats.special), [[str(count) for count in stats.special.values()]])
    if stats.packing:
        shares = [
            [str(row.length), *(f"{value:.1%}" for value in (row.fit, row.unpacked, row.next_fit, row.best_fit,
                                                            row.packed_cuts))]
            for row in stats.packing
        ]  # fmt: skip
        names = ["seq_length", "documents that fit", "unpacked", "pack_until_overflow", "best_fit", "cut by packed"]
        yield _table(names, shares)
    yield "</article>\n"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>\n"
