"""The seeded mistakes fit the code as it is, and the runner tells those that tests catch from those alive."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, main
from tests.mutations.anchor import NoLongerApplies, Tree
from tests.mutations.ledger import Ledger
from tests.mutations.mistakes import Mistake, read_mistakes

MODULE = '''
def outer(values):
    """Sum of those above 0."""
    total = 0
    for value in values:
        if value > 0:  # none below
            total += value * (
                2 + 1
            )
    return total


class Holder:
    limit = 3

    def put(self, a, b):
        return a + b, a + b, f"{a - b}"
'''
PUT = {"function": "Holder.put", "before": "a+b", "after": "a - b"}
NUMBERS = {"function": "outer", "before": "2+1", "after": "2"}


def mistake(**changes: object) -> Mistake:
    fields = {"room": "r", "name": "m", "kind": "slip", "wrong": "w", "function": "outer", "before": "", "after": ""}
    return Mistake(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one module, one test of it, and two mistakes, one of which no test notices."""
    root = tmp_path / "tree"
    (root / "megatron").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "megatron" / "__init__.py").write_text("")
    (root / "megatron" / "module.py").write_text(MODULE)
    (root / "tests" / "test_module.py").write_text(
        "from megatron.module import outer\n\n\ndef test_outer():\n    assert outer([1, 2]) == 9\n"
    )
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['cpu: x', 'more: x']\n")
    (root / "tests" / "conftest.py").write_text(
        "import pytest\n\n\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
        "        item.add_marker(pytest.mark.cpu)\n"
    )
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def table(folder: Path, **mistakes: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = []
    for name, fields in mistakes.items():
        lines += [f"[{name}]", 'kind = "slip"', 'wrong = "w"']
        lines += [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    (folder / "room.toml").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def repository() -> Tree:
    return Tree(ROOT)


@pytest.mark.parametrize("room", sorted({mistake.room for mistake in read_mistakes()}))
def test_mistakes_apply(repository: Tree, room: str) -> None:
    for seeded in read_mistakes(rooms=[room]):
        path, wrong = repository.changed(seeded)
        assert wrong != repository.texts[path], seeded.name
        assert not [file for file in seeded.tests if not (ROOT / file).is_file()], seeded.name


def test_there_are_enough_of_each_kind() -> None:
    kinds = [seeded.kind for seeded in read_mistakes()]
    assert len(kinds) >= 100 and min(kinds.count(kind) for kind in ("slip", "generated")) >= 50


@pytest.mark.parametrize(
    "fields, expected",
    [
        (NUMBERS, "total += value * (\n                (2)\n"),
        ({**NUMBERS, "before": "value > 0", "after": "value >= 0"}, "if (value >= 0):"),
        ({**NUMBERS, "before": "total = 0", "after": "total = 1\nother = 2"}, "    total = 1\n    other = 2\n"),
        ({**NUMBERS, "before": "return total", "after": ""}, "    pass\n"),
        ({**PUT, "occurrence": 2}, "return a + b, (a - b), f"),
        ({**PUT, "before": "a - b", "after": "a"}, 'f"{(a)}"'),
        ({**PUT, "function": "Holder", "before": "limit = 3", "after": "limit = 4"}, "limit = 4"),
        ({**PUT, "function": "elsewhere", "before": "value * (2 + 1)", "after": "value"}, "total += (value)"),
    ],
)
def test_places_are_found_whatever_their_lines(tree: Path, fields: dict[str, object], expected: str) -> None:
    seeded = mistake(**fields)
    assert expected in Tree(tree).changed(seeded)[1]


@pytest.mark.parametrize(
    "fields, fact",
    [
        (PUT, "2 places"),
        ({**PUT, "before": "a * b"}, "0 places"),
        ({**PUT, "occurrence": 3}, "0 places"),
        ({**NUMBERS, "before": "value > 0", "after": "value  >  0"}, "cannot be replaced"),
        ({**NUMBERS, "before": "return total", "after": "return ("}, "once it is made"),
        ({**NUMBERS, "before": "return ("}, "no Python"),
    ],
)
def test_what_no_longer_applies_is_an_error(tree: Path, fields: dict[str, object], fact: str) -> None:
    seeded = mistake(**fields)
    with pytest.raises(NoLongerApplies, match=f"m: .*{fact}"):
        Tree(tree).changed(seeded)


def test_a_moved_function_keeps_its_mistake(tree: Path) -> None:
    seeded = mistake(**NUMBERS)
    moved = tree / "megatron" / "sub" / "other.py"
    moved.parent.mkdir()
    (tree / "megatron" / "module.py").rename(moved)
    assert Tree(tree).find(seeded).path == moved
    (tree / "megatron" / "again.py").write_text(MODULE)
    with pytest.raises(NoLongerApplies, match=r"again\.py, .*other\.py"):
        Tree(tree).find(seeded)


def run(tree: Path, tmp_path: Path, *words: str) -> int:
    options = ["--root", str(tree), "--mistakes", str(tmp_path / "tables"), "--ledger", str(tmp_path / "ledger.json")]
    return main([*options, "--jobs", "1", *words])


def test_caught_and_alive_are_told_apart_and_kept(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = table(tmp_path / "tables", wrong_sum=NUMBERS, unseen={**PUT, "occurrence": 1})
    assert run(tree, tmp_path) == 0
    out = capsys.readouterr().out
    assert "room/wrong_sum: caught by tests/test_module.py::test_outer" in out
    assert "room/unseen: ALIVE" in out and "50 %" in out
    assert (tree / "megatron" / "module.py").read_text() == MODULE
    rows = Ledger(tmp_path / "ledger.json").rows
    assert rows["wrong_sum"].how == "failed" and rows["unseen"].tests == 1

    table(folder, wrong_sum=NUMBERS, unseen={**PUT, "occurrence": 2}, gone={**NUMBERS, "before": "9"})
    assert run(tree, tmp_path) == 1, "one no longer applies"
    out = capsys.readouterr().out
    assert "room/wrong_sum: " not in out, "it is in the ledger"
    assert "room/unseen: ALIVE" in out, "its text has changed"
    assert "room/gone: ERROR: gone" in out
    assert Ledger(tmp_path / "ledger.json").rows["wrong_sum"] == rows["wrong_sum"]


def test_what_fails_without_the_mistake_too_catches_nothing(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "tables", unseen={**PUT, "occurrence": 1})
    test = tree / "tests" / "test_module.py"
    test.write_text(f"{test.read_text()}\n\ndef test_broken():\n    assert outer([]) == 1\n")
    assert run(tree, tmp_path) == 0
    assert "room/unseen: ALIVE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mutated, limit, ending",
    [
        ("while True: pass", "5", "(hung)"),
        ("import os; os.kill(os.getpid(), 9)", "600", "(crashed)"),
        ("return undefined", "600", "test_module.py::test_outer in"),
    ],
)
def test_other_endings(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mutated: str, limit: str, ending: str
) -> None:
    table(tmp_path / "tables", one={"function": "outer", "before": "return total", "after": mutated})
    assert run(tree, tmp_path, "--limit", limit) == 0
    out = capsys.readouterr().out
    assert "room/one: caught by tests/test_module.py" in out and ending in out


def test_a_file_that_cannot_be_collected_catches(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "tables", one={"function": "Holder", "before": "limit = 3", "after": "limit = nothing"})
    assert run(tree, tmp_path) == 0
    assert "room/one: caught by tests/test_module.py (not collected)" in capsys.readouterr().out


def test_list_and_unknown_names(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(tmp_path / "tables", one=NUMBERS)
    assert run(tree, tmp_path, "--list") == 0
    assert "room/one (slip): not tried" in capsys.readouterr().out
    assert run(tree, tmp_path, "--name", "two") == 1
    assert "unknown: two; known: one" in capsys.readouterr().err


def test_digest_is_of_what_is_done() -> None:
    seeded = mistake(**NUMBERS)
    assert dataclasses.replace(seeded, wrong="other words").digest == seeded.digest
    assert dataclasses.replace(seeded, after="3").digest != seeded.digest
