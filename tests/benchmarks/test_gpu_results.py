"""The page of results is made from the tables of `make gpu`, and from nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_run import results
from benchmarks.gpu_run.process import Outcome
from tests.benchmarks.stub_parts import FACTS_FOUND, STEP, parts
from tools.docs.gpu_results import BEGIN, END, NONE, main, section


def write(folder: Path, kind: str = "gpu") -> Path:
    """A table of what stub parts might have given."""
    found: dict[str, Any] = {
        "facts": Outcome("facts", "passed", 4.0, result=eval(FACTS_FOUND)),
        "tests": Outcome("tests", "failed", 9.0, "1 of 2 tests failed", tests=[
            {"name": "test_stub.py::test_a", "outcome": "passed", "reason": ""},
            {"name": "test_stub.py::test_b", "outcome": "failed", "reason": "wrong"},
        ]),
        "long": Outcome("long", "left out", reason="no time: it takes about 9999 s"),
        "slow": Outcome("slow", "passed", 9.0, result={"rows": [
            {"experts": "30b", "name": "ours", "seconds": 0.0074, "beside_ours": 1.0},
        ]}),
        "crash": Outcome("crash", "passed", 9.0, result={"rows": [
            {"name": "loss in chunks", "milliseconds": 16.62, "over_floor": 1.304, "peak": 83e7},
        ]}),
        "bare": Outcome("bare", "passed", 40.0, result=eval(STEP.replace("SECONDS", "0.5"))),
        "engine": Outcome("engine", "passed", 41.0, result=eval(STEP.replace("SECONDS", "0.4"))),
    }  # fmt: skip
    path = folder / "2030-01-02-stub.json"
    about = {"kind": kind, "date": "2030-01-02", "commit": "abc", "device": "NVIDIA Stub"}
    results.write(path, about, parts(folder), found)
    return path


def test_no_result_is_said() -> None:
    assert section(Path("/nonexistent")) == NONE


def test_the_page_is_made_from_the_table(tmp_path: Path) -> None:
    path, page = write(tmp_path), tmp_path / "page.md"
    page.write_text(f"# Speed\n{BEGIN}old\n{END}the rest\n")
    argv = ["--results", str(tmp_path), "--page", str(page)]
    assert main([*argv, "--check"]) == 1
    assert main(argv) == 0
    text = page.read_text()
    assert text.startswith("# Speed\n") and text.endswith("the rest\n") and "old" not in text
    assert "### NVIDIA Stub, 2030-01-02" in text
    assert "| tests of a stub | failed | 1 passed, 1 failed | 9 |" in text
    assert "| engine | 400.0 | 1 | 400.0 | 52.0% | 1.250 of: bare | 31.0 |" in text
    assert "| a block of experts | | ms | speed beside ours |\n|---|---|---:|---:|\n| 30b | ours | 7.4 | 1.00 |" in text
    assert "| loss in chunks | 16.6 | 1.30 | 0.83 |" in text
    assert "- tests: failed, 1 of 2 tests failed: `test_stub.py::test_b`" in text
    assert "- long: left out, no time" in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--check"]) == 0
    path.with_suffix(".png").unlink()
    assert main([*argv, "--check"]) == 1, "a plot is missing"


def test_a_rehearsal_is_no_result(tmp_path: Path) -> None:
    write(tmp_path, kind="rehearsal")
    with pytest.raises(ValueError, match="say nothing of a GPU"):
        section(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"parts": []}))
    with pytest.raises(ValueError, match="format"):
        section(tmp_path)
