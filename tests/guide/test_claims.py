"""tests/claims.toml: each claim of the documentation has its test, in the target that it names."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.guide.page import ROOT

CLAIMS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "claims.toml").read_text())["claim"]
# Marks of whole functions, by target: what it runs besides functions without any, and what alone it runs.
MARKS_OF_TARGETS: dict[str, set[str]] = {"make test": set(), ".ci/run": {"more"}, "make test-all": {"more", "product"}}
ONLY_MARK_OF_TARGETS = {"make gpu": "gpu", "make test-real": "real", "make test-slurm": "slurm", "make soak": "soak"}
DECIDE = {"more", "product", "browser", "install", *ONLY_MARK_OF_TARGETS.values()}
PEERS = "TRL|transformers|peft|DeepSpeed|lm-eval|datatrove|Megatron|GPT-NeoX"
COMPARES = re.compile(rf"\b({PEERS}|(every|any) layout|one process)\b")


@cache
def marks_of(file: str) -> dict[str, set[str]]:
    """The marks of a file's test functions, not of single parameters; by lines, since a parser is slow."""
    text = (ROOT / file).read_text()
    file_mark = re.search(r"^pytestmark = (\[[^]]*]|.*)", text, re.MULTILINE)
    file_marks = set(re.findall(r"pytest\.mark\.(\w+)", file_mark[1])) if file_mark else set()
    marks_by_name, function_marks = dict[str, set[str]](), set[str]()
    for line in text.splitlines():
        if mark := re.match(r"@pytest\.mark\.(\w+)", line):
            function_marks.add(mark[1])
        elif function := re.match(r"(?:async )?def (test_\w+)", line):
            marks_by_name[function[1]], function_marks = DECIDE & (file_marks | function_marks), set()
    return marks_by_name


def problems_of(claim: dict[str, Any]) -> Iterator[str]:
    target = claim["target"]
    if not (ROOT / claim["doc"]).is_file():
        yield f"there is no page {claim['doc']}"
    if (
        claim["kind"] not in ("golden", "peer", "layout")
        or target not in MARKS_OF_TARGETS | ONLY_MARK_OF_TARGETS
        or not claim["tests"]
    ):
        yield "of no kind, of no target or without a test"
    for test in claim["tests"]:
        file, name = test.split("::")
        if not (ROOT / file).is_file() or name not in marks_of(file):
            yield f"{test} is not there"
        elif target in ONLY_MARK_OF_TARGETS and marks_of(file)[name] != {ONLY_MARK_OF_TARGETS[target]}:
            yield f"{test} is not of {target}"
        elif target in MARKS_OF_TARGETS and not marks_of(file)[name] <= MARKS_OF_TARGETS[target]:
            yield f"{target} leaves {test} out"


def test_every_claim_has_its_tests() -> None:
    problems = [f"{claim['claim']}: {problem}" for claim in CLAIMS for problem in problems_of(claim)]
    assert not problems, "\n".join(problems)
    assert len({claim["claim"] for claim in CLAIMS}) == len(CLAIMS), "one stands there twice"


def test_every_page_that_compares_has_a_claim() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("post-training/**/*.md")]
    pages.remove(ROOT / "docs/index.md")  # navigation alone
    compare = {str(page.relative_to(ROOT)) for page in pages if COMPARES.search(page.read_text())}
    assert len(compare) > 20
    assert not compare - {claim["doc"] for claim in CLAIMS}
