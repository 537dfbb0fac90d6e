"""Text as it comes, against the text of all tokens at once."""

import random

import pytest

from megatron.generation.batching.sequence import IncrementalDetokenizer
from megatron.tokenizer import CharLevelTokenizer, HFTokenizer
from tests.generation.runs import TOKENIZER


def pieces(stream: IncrementalDetokenizer, tokens: list[int]) -> list[str]:
    """One a token, and what was held back; none after a stop string."""
    texts = []
    for token in tokens:
        texts.append(stream.add(token))
        if stream.stopped:
            break
    return [*texts, stream.finish()]


@pytest.mark.parametrize(("content", "stop", "texts", "remainder"), [
    ("aé€".encode() + b"\xe2", [], ["a", "", "é", "", "", "€", ""], "\N{REPLACEMENT CHARACTER}"), (b"", [], [], ""),
    (b"xa", ["ab", "bcd"], ["x", ""], "a"), (b"bcaz", ["ab", "bcd"], ["", "", "bc", "az"], ""),
])  # fmt: skip
def test_text_comes_as_soon_as_it_can(content: bytes, stop: list[str], texts: list[str], remainder: str) -> None:
    """Once characters are whole, and nothing is held that begins no stop string."""
    stream = IncrementalDetokenizer(CharLevelTokenizer().detokenize, stop)
    assert ([stream.add(byte) for byte in content], stream.finish()) == (texts, remainder)


def test_pieces_make_the_full_text() -> None:
    tokenizer = HFTokenizer(TOKENIZER)
    draws = random.Random(0)
    for _ in range(50):
        tokens = draws.choices(range(2, tokenizer.vocab_size), k=40)
        tokens += tokenizer.tokenize("naïve 漢字 🙂 e\u0301 \n\n tabs\t and  spaces ")
        assert "".join(pieces(IncrementalDetokenizer(tokenizer.detokenize), tokens)) == tokenizer.detokenize(tokens)


@pytest.mark.parametrize(("text", "stop", "expected"), [
    ("one.\n\nTwo", ["\n\n"], "one."), ("one two three", ["three", "two"], "one "), ("aaab", ["aab"], "a"),
    ("aaaa", ["aab"], "aaaa"), ("abc", ["abcd", "c"], "ab"), ("STOP", ["STOP"], ""), ("xab", ["b", "ab"], "x"),
    ("ends with ST", ["STOP"], "ends with ST"), ("né€", ["€"], "né"), ("plain", ["", "\n"], "plain"),
])  # fmt: skip
def test_stop_strings(text: str, stop: list[str], expected: str) -> None:
    stream = IncrementalDetokenizer(CharLevelTokenizer().detokenize, stop)
    texts = pieces(stream, list(text.encode()))
    assert "".join(texts) == expected
    assert stream.stopped == any(string in text for string in stop if string)
    for end in range(len(texts)):  # nothing was shown that a longer text takes back
        assert expected.startswith("".join(texts[:end]))
