"""Inputs of every kind, spoilt at random or saved as past failures, end in success or in one clear error."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz import (
    chat_templates,
    checkpoints,
    command_lines,
    config_files,
    environment,
    huggingface_folders,
    indexed_data,
    requests,
    rows,
)
from tests.fuzz.campaign import Counts, Kind, Refused, fuzz, judge
from tests.fuzz.cases import Case, saved_cases, to_json

KINDS = {
    module.KIND.name: module.KIND
    for module in (
        config_files, rows, indexed_data, checkpoints, huggingface_folders, chat_templates, requests, environment,
        command_lines,
    )
}  # fmt: skip
FEW_EXAMPLES = {
    "huggingface_folders": 6,
    "config_files": 15,
    "rows": 15,
    "chat_templates": 15,
    "checkpoints": 10,
}  # else 25
NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES") or 1200)  # of each kind: 10,800 in all
FAILURES = Path(".cache/fuzz")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def failures(kind: Kind, counts: Counts) -> str:
    """Saves the cases that failed, and returns their tracebacks."""
    texts = []
    for number, (reason, (case, text)) in enumerate(counts.failures.items()):
        file = FAILURES / kind.name / f"{number:02d}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_json(case, reason))
        texts.append(f"{reason}, saved as {file.absolute()}\n{text}")
    return "\n".join(texts)


@pytest.mark.parametrize("name", KINDS)
def test_a_few_inputs(name: str, tmp_path: Path) -> None:
    """The same inputs in every run."""
    counts = fuzz(KINDS[name], FEW_EXAMPLES.get(name, 25), tmp_path / "x")
    assert counts.num_inputs and not counts.failures, failures(KINDS[name], counts)


@pytest.mark.parametrize(("name", "case"), [
    pytest.param(name, case, id=f"{name}: {label}") for name in KINDS for label, case in saved_cases(name)
])  # fmt: skip
def test_past_failures(name: str, case: Case, tmp_path: Path) -> None:
    verdict, text = judge(KINDS[name], case, tmp_path / "x")
    assert verdict in ("succeeded", "refused"), text


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", KINDS)
def test_many_inputs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other inputs in every run; `make fuzz` shows the counts."""
    number = int(os.environ.get("FUZZ_SEED") or int.from_bytes(os.urandom(4)))
    counts = fuzz(KINDS[name], NUM_EXAMPLES, tmp_path / "x", number)
    with capsys.disabled():
        print(f"\n{name:20s} {counts}  seed {number}", flush=True)
    assert not counts.failures, failures(KINDS[name], counts)


def test_a_failure_is_seen(tmp_path: Path) -> None:
    """A traceback, a message without a word, and a file that a refusal leaves are failures."""

    def run(folder: Path) -> None:
        content = (folder / "a").read_bytes()
        if content == b"left":
            (folder / "b").touch()
        if content != b"crash":
            raise Refused({b"left": "no", b"object": f"{object()}", b"empty": " "}.get(content, "a.yml:3: key: no"))
        raise KeyError("b")

    contents = (b"crash", b"object", b"empty", b"left", b"fine")
    counts = fuzz(Kind("mistakes", st.sampled_from([{"a": text} for text in contents]), run), 50, tmp_path / "x", 1)
    assert len(counts.failures) == 4 and counts.refused == counts.num_inputs - 4 and not counts.succeeded
    assert {case["a"] for case, _ in counts.failures.values()} == {*contents[:4]}
