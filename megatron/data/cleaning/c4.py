"""Implements the quality rules of C4 and FineWeb, with datatrove's thresholds, word lists and reason names.

C4: Raffel et al. 2020, https://arxiv.org/abs/1910.10683. FineWeb: Penedo et al. 2024,
  https://arxiv.org/abs/2406.17557.
"""

import re
from collections import Counter
from dataclasses import dataclass

from megatron.data.cleaning.gopher import duplicates
from megatron.data.cleaning.words import TERMINAL_PUNCTUATION, Document

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_ENDS, _ELLIPSIS = (".", "?", "!", '"', "'"), "..."
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_STOPS = tuple(TERMINAL_PUNCTUATION)


@dataclass(frozen=True)
class C4:
    """The C4 rule: removes citation marks and bad lines from a document, and drops bad documents.

    A line is bad if it lacks end punctuation, has too few words or an overlong word, or mentions JavaScript,
    cookies, a privacy policy or terms of use. A document is bad if it holds `{` or lorem ipsum, or if too few
    sentences are left. -1 turns a threshold off.
    """

    remove_citations: bool = True
    filter_no_terminal_punct: bool = True
    min_num_sentences: int = 5
    min_words_per_line: int = 3
    max_word_length: int = 1000
    filter_lorem_ipsum: bool = True
    filter_javascript: bool = True
    filter_curly_bracket: bool = True
    filter_policy: bool = True

    def check(self, document: Document, lines_out: Counter[str]) -> tuple[str | None, str]:
        """Return (reason to drop the document, None to keep it; its text without the bad lines).

        lines_out: counts of removed lines by reason; those of this document are added.
        """
        retained_lines: list[str] = []
        out: Counter[str] = Counter()
        sentences = 0
        for line in document.text.splitlines():
            reason = None
            words, line = line.split(), line.strip()
            if self.remove_citations and "[" in line:
                line = _CITATION.sub("", line)
            lower = line.lower()
            if self.max_word_length != -1 and any(len(word) > self.max_word_length for word in words):
                reason = "too_long_word"
            elif self.filter_no_terminal_punct and (not line.endswith(_ENDS) or line.endswith(_ELLIPSIS)):
                reason = "no_terminal_punct"
            elif len(words) < self.min_words_per_line:
                reason = "too_few_words"
            elif self.filter_lorem_ipsum and "lorem ipsum" in lower:
                return "lorem_ipsum", document.text
            elif self.filter_javascript and "javascript" in lower:
                reason = "javascript"
            elif self.filter_curly_bracket and "{" in line:
                return "curly_bracket", document.text
            elif self.filter_policy and any(phrase in lower for phrase in _POLICY):
                reason = "policy"
            if reason is not None:
                out[reason] += 1
                continue
            if self.min_num_sentences != -1:
                sentences += document.splitter.sentences(line)
            retained_lines.append(line)
        if sentences < self.min_num_sentences:
            return "too_few_sentences", document.text
        lines_out.update(out)
        return None, "\n".join(retained_lines).strip()


@dataclass(frozen=True)
class FineWeb:
    """The FineWeb rule: drops documents whose lines rarely end like sentences, are short, are repeated, or
    form a list."""

    line_punct_thr: float = 0.12
    line_punct_exclude_zero: bool = False
    short_line_thr: float = 0.67
    short_line_length: int = 30
    char_duplicates_ratio: float = 0.01
    new_line_ratio: float = 0.3

    def check(self, document: Document) -> str | None:
        """Return the reason to drop a document; None to keep it."""
        text = document.text
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            return "empty"
        ends = sum(line.endswith(_STOPS) for line in lines) / len(lines)
        if ends < self.line_punct_thr and not (ends == 0 and self.line_punct_exclude_zero):
            return "line_punct_ratio"
        if sum(len(line) <= self.short_line_length for line in lines) / len(lines) > self.short_line_thr:
            return "short_line_ratio"
        breaks = text.count("\n")
        if duplicates(lines)[1] / (len(text) - breaks) > self.char_duplicates_ratio:
            return "char_dup_ratio"
        count = sum(len(chunk.words) for chunk in document.chunks)
        if count and breaks / count > self.new_line_ratio:
            return "list_ratio"
        return None
