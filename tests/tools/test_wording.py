"""The linter of words: names, first sentences of docstrings, pages, and ceilings that only go down."""

import ast
import subprocess
from pathlib import Path

import pytest

from tools.lint import ceilings, docstrings, pages, wording
from tools.lint.ceilings import read_ceilings, write_ceilings
from tools.lint.names import WordLists, bound_names
from tools.lint.sentences import sentences

WORDS = WordLists.read()
LONG = "Returns " + "word " * 24 + "{}."


@pytest.mark.parametrize(
    "name, word",
    [("first", "alone"), ("_found", "alone"), ("SAID", "alone"), ("of_weight", "of"), ("by_layer", "by"),
     ("Given", "alone"), ("used_by", "by"), ("is_whole", "full"), ("CutRows", "sharded"), ("beside_group", "with")],
)  # fmt: skip
def test_empty_names(name: str, word: str) -> None:
    rule = WORDS.broken_rule(name)
    assert rule is not None and word in rule


@pytest.mark.parametrize(
    "name",
    ["first_row", "from_file", "to_dict", "on_step_end", "pad_to_multiple_of", "cutoff", "num_layers", "_", "__of__",
     "make_vocab_size_divisible_by", "x", "OfflineStore"],
)  # fmt: skip
def test_names_of_the_field(name: str) -> None:
    assert WORDS.broken_rule(name) is None


def test_every_kind_of_name_is_read_once_for_each_scope() -> None:
    code = """\
import os as alias
class Kind:
    member: int
    def method(self, argument, *rest, **options):
        self.attribute = local = argument
        local = unbound.other
        for local, turn in []: pass
        with open(x) as handle: pass
        try: pass
        except OSError as error: pass
        match handle:
            case [element, *tail]: pass
        return lambda item: (walrus := item)
def member(): global alias
"""
    names = list(bound_names(ast.parse(code)))
    assert sorted(names) == sorted([
        ("alias", 1), ("Kind", 2), ("member", 3), ("method", 4), ("self", 4), ("argument", 4), ("rest", 4),
        ("options", 4), ("attribute", 5), ("local", 5), ("turn", 7), ("handle", 8), ("error", 10), ("element", 12),
        ("tail", 12), ("item", 13), ("walrus", 13), ("member", 14),
    ])  # fmt: skip


def test_sentences_end_at_full_stops() -> None:
    text = "Reads a.b, e.g. Arrow, version 1.5. The rest\nis `x. Y`? No."
    assert sentences(text) == ["Reads a.b, e.g. Arrow, version 1.5.", "The rest is `x. Y`?", "No."]


@pytest.mark.parametrize(
    "text, broken",
    [(LONG.format("here"), "26"), (LONG.format("").replace("word ", "", 1), None), ("What a run needs.", "What"),
     ("Of the rows those that train.", "Of"), (f"Reads rows.\n\n{LONG.format('here')}", None),
     ("Reads `a b c`. What follows is free.", None)],
)  # fmt: skip
def test_first_sentences(text: str, broken: str | None) -> None:
    rule = docstrings.broken_rule(text)
    assert rule is None if broken is None else rule is not None and broken in rule


def test_docstrings_of_modules_classes_functions_and_fields() -> None:
    code = '"""A."""\nclass B:\n    """B."""\n    c: int\n    """C."""\n    if c:\n'
    code += '        def d(): "D."\n    f()\n    "no"\n'
    assert list(docstrings.docstrings(ast.parse(code))) == [(1, "A."), (3, "B."), (5, "C."), (7, "D.")]


def test_prose_of_a_page() -> None:
    text = """\
# That heading

A paragraph [which](that.md) goes
on. `what`

```yaml
what: that
```
<!-- that: what -->
- an item that
  goes on
| a cell | whose `that` |
|---|---|
"""
    assert [line for line, _ in pages.blocks(text)] == [1, 3, 10, 12, 12]
    page = pages.read_page("a.md", text + "\n" + "word " * 36)
    assert (page.relative, page.words) == (4, 2 + 6 + 5 + 2 + 2 + 36)
    assert [(finding.path, finding.line) for finding in page.long] == [("a.md", 15)]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one finding of each kind, and ceilings of just these."""
    texts = {
        "megatron/data/deep/rows.py": f'"""{LONG.format("here")}"""\n\n\ndef found(): "Of rows."\n',
        "docs/page.md": "that " + "word " * 35,
        "tests/page.md": "that that that",
        ".gitignore": "build",
        "build/made.py": "found = 1",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(wording, "ROOT", tmp_path)
    monkeypatch.setattr(wording, "CEILINGS", tmp_path / "ceilings.toml")
    write_ceilings(wording.CEILINGS, CEILINGS)
    return tmp_path


CEILINGS: ceilings.Numbers = {
    "names": {"megatron/data": 1}, "long_docstrings": {"megatron/data": 1},
    "docstring_fragments": {"megatron/data": 1},
    "relative_words_per_100": {"docs/page.md": 2.8}, "long_sentences": {"docs/page.md": 1},
}  # fmt: skip


def test_ceilings_of_what_there_is(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wording.main([]) == 0
    assert capsys.readouterr() == ("", "")
    assert wording.main([str(tree / "megatron")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"megatron/data/deep/rows.py:{line}" for line in (4, 1, 4)]
    assert wording.main(["--table"]) == 0
    output = capsys.readouterr().out
    assert "50.00%" in output and "megatron/data/deep/rows.py:4" in output


@pytest.mark.parametrize("kind", CEILINGS)
def test_a_ceiling_fails_above_and_below(kind: str, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [(place, number)] = CEILINGS[kind].items()
    write_ceilings(wording.CEILINGS, {**CEILINGS, kind: {place: number - 1}})
    assert wording.main([]) == 1 and place in capsys.readouterr().err
    assert wording.main(["--write"]) == 1, "writing raises none"
    write_ceilings(wording.CEILINGS, {**CEILINGS, kind: {place: number + 1}, "names": {"gone": 2, "megatron/data": 1}})
    assert wording.main([]) == 1 and place in capsys.readouterr().err
    assert wording.main(["--write"]) == 0
    assert read_ceilings(wording.CEILINGS) == CEILINGS


def test_few_relative_words_need_no_row(tree: Path) -> None:
    (tree / "docs/page.md").write_text("that " + "word. Word " * 40)
    assert wording.main(["--write"]) == 0
    assert read_ceilings(wording.CEILINGS)["relative_words_per_100"] == {}
