"""Documents of the standard library's words, damaged in many ways: the same wherever Python is the same."""

import ast
import random
import re
import sysconfig
from functools import cache
from pathlib import Path

_WORDS = ("the", "of", "a", "model", "learns", "from", "data", "and", "its", "errors", "with", "every", "step")


@cache
def paragraphs() -> tuple[str, ...]:
    """Paragraphs of the docstrings and comments of the library, of pydoc's topics, and of sources."""
    from pydoc_data.topics import topics

    passages: list[str] = []
    for text in topics.values():
        passages += re.split(r"\n{2,}", text)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:70]:
        source = path.read_text(encoding="utf-8", errors="replace")
        passages += [source[i : i + 400] for i in range(0, len(source), 4000)]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                passages += re.split(r"\n{2,}", text)
    return tuple(part for part in passages if part.strip())


def documents(count: int, seed: int = 0) -> list[str]:
    """Returns `count` documents; two of three are damaged in one to three ways."""
    draw = random.Random(seed)
    parts = paragraphs()
    texts = []
    for _ in range(count):
        begin = draw.randrange(len(parts))
        text = draw.choice(("\n\n", "\n", "\n\n\n")).join(parts[begin : begin + draw.choice((1, 2, 3, 5, 8, 13))])
        if draw.random() < 0.3:
            text = re.sub(r"(?<=\S) *\n *(?=\S)", " ", text)  # lines of a paragraph become one
        for damage in draw.sample(DAMAGES, draw.choice((0, 1, 1, 2, 3))):
            text = damage(text, draw)
        texts.append(text[: draw.choice((1500, 4000))])
    return texts


def _some_lines(change: object) -> object:
    def damage(text: str, draw: random.Random) -> str:
        share = draw.random()
        return "\n".join(change(line, draw) if draw.random() < share else line for line in text.split("\n"))  # type: ignore[operator]

    return damage


def _some_words(change: object) -> object:
    def damage(text: str, draw: random.Random) -> str:
        share = draw.random() ** 2
        return "".join(
            change(part, draw) if draw.random() < share and part.strip() else part  # type: ignore[operator]
            for part in re.split(r"(\s+)", text)
        )

    return damage


def _insert(text: str, insertion: str, draw: random.Random) -> str:
    offset = draw.randrange(len(text) + 1)
    return text[:offset] + insertion + text[offset:]


def _repeat(text: str, draw: random.Random) -> str:
    parts = re.split(draw.choice((r"(\n)", r"(\n\n)", r"(\s+)")), text)
    begin = draw.randrange(len(parts))
    piece = "".join(parts[begin : begin + draw.choice((1, 2, 4, 9, 21))])
    return _insert(text, draw.choice(("", "\n", " ")).join([piece] * draw.choice((2, 3, 8, 30))), draw)


DAMAGES = [
    _repeat,
    _repeat,
    _some_lines(lambda line, draw: draw.choice(("- ", "• ", "  -", "* ")) + line),
    _some_lines(lambda line, draw: line + draw.choice(("...", "…", ".", "!", '"', "?'", ".  ", ". [12]", "。"))),
    _some_lines(lambda line, draw: line.rstrip(".?!\"'")),
    _some_lines(lambda line, draw: line[: draw.randrange(1, 32)]),
    _some_lines(lambda line, draw: ""),
    _some_lines(lambda line, draw: line + draw.choice(("\t", "  ", "\xa0", "\u2003", "\r", "\x0b", "\x85", "\u2028"))),
    _some_lines(lambda line, draw: " ".join(draw.choices(_WORDS, k=draw.randrange(1, 25))) + "."),
    _some_words(lambda word, draw: "#" + word),
    _some_words(lambda word, draw: word + "..."),
    _some_words(lambda word, draw: str(draw.randrange(10**6))),
    _some_words(lambda word, draw: draw.choice(("::", "==>", "|", "(c)", "e.g.", "U.S.", ":-)", "don't", "C++", "--"))),
    _some_words(lambda word, draw: word * draw.randrange(1, 5)),
    _some_words(lambda word, draw: word[0]),
    _some_words(lambda word, draw: draw.choice("日本語 naïve Ещё ١٢ e\u0301te\u0301 🙂 ﬁne \u200b".split(" "))),
    lambda text, draw: _insert(text, draw.choice((" { ", " lorem ipsum ", " Javascript ", " cookie policy ")), draw),
    lambda text, draw: _insert(text, "x" * draw.choice((30, 999, 1001)), draw),
    lambda text, draw: re.sub(r"\. ", lambda _: draw.choice((".\n", ". ", "." + "\n" * 3)), text),
    lambda text, draw: text.replace(" ", draw.choice(("  ", "\t", "\n"))),
    lambda text, draw: text.upper(),
    lambda text, draw: _insert(text, draw.choice((*"\x00\x1c\x7f\ufeff", "[edit]", "[citation needed]")), draw),
]
