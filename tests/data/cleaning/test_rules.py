"""Rules of cleaning give what datatrove gives for every document: its verdict, why, and the text left."""

import json
from collections import Counter

import pytest
from datatrove.data import Document as DatatroveDocument
from datatrove.pipeline import filters
from datatrove.utils.text import PUNCTUATION_SET, simplify_text, split_into_sentences
from datatrove.utils.word_tokenizers import load_word_tokenizer

from megatron.data.cleaning.recipe import Cleaner, Edits, Recipe, rules_of
from megatron.data.cleaning.shingles import WordHashes
from megatron.data.cleaning.words import PUNCTUATION, TERMINAL_PUNCTUATION, Document, Splitter
from megatron.data.errors import DataError
from tests.data.cleaning.corpus import documents

FILTERS = {"gopher-repetition": filters.GopherRepetitionFilter, "gopher-quality": filters.GopherQualityFilter,
           "c4": filters.C4QualityFilter, "fineweb": filters.FineWebQualityFilter}  # fmt: skip


def datatrove_verdicts(name: str, texts: list[str], **settings: object) -> list[tuple[str | None, str]]:
    rule, verdicts = FILTERS[name](**settings), []
    for text in texts:
        document = DatatroveDocument(text=text, id="")
        verdict = rule.filter(document)
        verdicts.append((None if verdict is True else verdict[1], document.text))
    return verdicts


def megatron_verdicts(name: str, texts: list[str], *settings: str) -> list[tuple[str | None, str]]:
    cleaner, edits = Cleaner(Recipe(normalize=(), rules=rules_of([name], settings))), Edits()
    verdicts = []
    for text in texts:
        left, reason = cleaner.clean(text, edits)
        verdicts.append((None if reason in (None, "empty/empty") else reason.removeprefix(f"{name}/"), left))
    return verdicts


def compare(texts: list[str], min_reasons: tuple[int, ...]) -> None:
    """min_reasons: number of different verdicts that each rule has to give."""
    for name, num_reasons in zip(FILTERS, min_reasons, strict=True):
        expected, actual = datatrove_verdicts(name, texts), megatron_verdicts(name, texts)
        for text, expected_verdict, actual_verdict in zip(texts, expected, actual, strict=True):
            assert actual_verdict[0] == expected_verdict[0], (name, text)
            assert expected_verdict[0] is not None or actual_verdict[1] == expected_verdict[1], (name, text)
        reasons = Counter(reason for reason, _ in expected)
        assert len(reasons) >= num_reasons and min(reasons[None], len(texts) - reasons[None]) > len(texts) / 20, reasons


def test_every_verdict_is_datatrove_s() -> None:
    compare(documents(200, seed=1), (6, 5, 3, 4))


@pytest.mark.product
@pytest.mark.parametrize("seed", range(10, 18))
def test_on_twenty_thousand_documents(seed: int) -> None:
    compare(documents(2500, seed), (12, 9, 4, 5))


@pytest.mark.parametrize(("name", "settings"), [
    ("gopher-quality", {"min_doc_words": 20, "max_avg_word_length": 6.5, "min_stop_words": 0}),
    ("gopher-repetition", {"top_n_grams": [[2, 0.1], [5, 0.2]], "dup_line_frac": 0}),
    ("c4", {"filter_no_terminal_punct": False, "min_num_sentences": 2, "min_words_per_line": -1}),
    ("fineweb", {"line_punct_exclude_zero": True, "short_line_length": 10}),
])  # fmt: skip
def test_other_thresholds(name: str, settings: dict[str, object]) -> None:
    texts = documents(90, seed=2)
    verdicts = megatron_verdicts(name, texts, *(f"{name}.{key}={json.dumps(value)}" for key, value in settings.items()))
    assert [reason for reason, _ in verdicts] == [reason for reason, _ in datatrove_verdicts(name, texts, **settings)]
    assert verdicts != megatron_verdicts(name, texts), "other thresholds, other verdicts"


def test_words_and_signs_are_datatrove_s() -> None:
    splitter, tokenizer = Splitter(), load_word_tokenizer("eng")
    odd = "Dr. IS_ALPHA can't  won't\u2003C++ (a.m.) 10km\t\u200b x\x1cy http://a.b/c?d=1, foo@bar.com :-) " + "z" * 70
    for text in [odd, *documents(60, seed=3)]:
        assert Document(text, splitter).words == tokenizer.word_tokenize(text)
    assert PUNCTUATION | TERMINAL_PUNCTUATION == PUNCTUATION_SET
    hashes = WordHashes()
    for text in [odd, "1,000.5 ١٢٣ É ﬁ Σίσυφος ΣΑΣ", *documents(60, seed=4)]:
        assert hashes.words(text) == simplify_text(text).split()


def test_a_line_of_signs_takes_no_minutes() -> None:
    """spaCy's time would grow with the square of its length."""
    splitter = Splitter()
    for sign in "=(!'":
        assert splitter["ab" + sign * 150_000].words
    words = [word for start in ("=" * 300, "x" * 9000) for word in splitter[start].words]
    assert words == ["="] * 300 + ["x" * 9000]


def test_sentences_are_datatrove_s() -> None:
    splitter = Splitter()
    lines = [
        'He said "Stop." (Really!) and left... Then? "No." x', "One.) Two!? three. - four", "A.  B.\tC.\xa0", "...",
        "Dr. Who lives in the U.S. and Mr. x e.g. here.", "。中文。 English. ١٢؟ x", ".", ". . . a. . b", " Led. By",
        "a", *(line.strip() for text in documents(40, seed=20) for line in text.splitlines() if line.strip()),
    ]  # fmt: skip
    expected = [len(split_into_sentences(line)) for line in lines]
    assert [splitter.sentences(line) for line in lines] == expected and max(expected) > 3


@pytest.mark.parametrize(("names", "settings", "message"), [
    (["gofer"], [], "gofer.*gopher"),
    (["gopher", "gopher-quality"], [], "twice"),
    (["c4"], ["c4.min_sentences=1"], "min_sentences.*min_num_sentences"),
    (["c4"], ["c4.min_num_sentences=many"], "value.*5"),
    (["c4"], ["fineweb.new_line_ratio=1"], "fineweb.*RULE .*c4"),
    (["gopher-repetition"], ["gopher-repetition.top_n_grams=[2]"], r"top_n_grams=\[2\]: .*value"),
])  # fmt: skip
def test_settings_that_are_none(names: list[str], settings: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rules_of(names, settings)
