"""`make gpu`: no part takes another with it, a run that is cut leaves a table; the page of results."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_run import results, run
from benchmarks.gpu_run.parts import FACTS, REQUIRED, RESULT, ablations, parts, rehearsed
from benchmarks.gpu_run.process import Outcome, _tail
from benchmarks.train_throughput import ThroughputRow, parse, settings
from megatron.neox_arguments import arguments_dump
from tests.benchmarks import stub_parts
from tests.benchmarks.stub_parts import FACTS_FOUND, STEP
from tests.launch.runs import PIPED_OUTPUT, ROOT, wait_for
from tools.docs.gpu_results import BEGIN, END, NO_RESULTS, main, section

PARTS = ("tests", "crash", "memory", "empty", "slow", "rival", "long", "bare", "engine")
Ran = tuple[int, str, dict[str, dict[str, Any]]]


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.stub_parts", str(folder), *argv]
    return subprocess.Popen(command, cwd=ROOT, **PIPED_OUTPUT)


def table(folder: Path) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in json.loads((folder / "table.json").read_text())["parts"]}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("gpu")
    process = start(folder, "--minutes", "1", "--only", *PARTS)
    stdout = process.communicate(timeout=200)[0]
    return process.returncode, stdout, table(folder)


@pytest.mark.more
def test_every_part_is_told_by_itself(ran: Ran) -> None:
    status, output, rows = ran
    assert status == 1, output
    assert {name: part["state"] for name, part in rows.items()} == {
        "facts": "passed", "tests": "failed", "crash": "failed", "memory": "failed", "empty": "failed",
        "slow": "cut", "rival": "left out", "long": "left out", "bare": "passed", "engine": "passed",
    }  # fmt: skip
    reasons = {"crash": "SIGABRT", "memory": "MemoryError: 17 GB asked", "empty": "wrote no", "long": "no time",
               "rival": "for want of a_package_that_is_not"}  # fmt: skip
    assert all(reason in rows[name]["reason"] for name, reason in reasons.items())
    assert "for want of a_package_that_is_not will be left out: rival" in output.split("begins", 1)[0], "at first"
    assert all(fact in output for fact in ("goes on with: long", "1.250 of the speed of: bare", "52.0%", "31.0 GB"))


def test_a_test_that_takes_its_process_down_leaves_the_others(ran: Ran) -> None:
    rows = {row["name"].split("::")[1]: row for row in ran[2]["tests"]["tests"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "test_before": "passed", "test_takes_it_down": "failed", "test_after": "passed", "test_wrong": "failed",
        "test_skipped": "skipped",
    }  # fmt: skip
    assert "SIGABRT" in rows["test_takes_it_down"]["reason"] and "assert 1 == 2" in rows["test_wrong"]["reason"]
    assert rows["test_skipped"]["reason"] == "no use here"
    assert "2 of 5 tests failed" in ran[1]


@pytest.mark.ends_processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_a_table(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_LIMIT_S", "300")
    process = start(tmp_path, "--only", "bare", "slow")
    wait_for(lambda: (tmp_path / "table.json").exists() and "slow" in table(tmp_path), 200)
    wait_for(lambda: list(tmp_path.glob(f"work/**/slow/{RESULT}")), 200)
    os.kill(process.pid, number)
    process.communicate(timeout=200)
    rows = table(tmp_path)
    assert process.returncode == (1 if number == signal.SIGTERM else -number)
    assert rows["facts"]["state"] == "passed"
    assert rows["slow"]["state"] == ("cut" if number == signal.SIGTERM else "running")
    if number == signal.SIGTERM:
        assert [row["seconds"] for row in rows["slow"]["result"]["rows"]] == [0.3], "what it had measured"
    assert results.earlier(tmp_path / "table.json")["slow"].state == "cut"


@pytest.mark.ends_processes
def test_a_signal_ends_all_that_run_side_by_side(tmp_path: Path) -> None:
    """The machine has eight cores, so two parts of tests run at once."""
    process = start(tmp_path, "--only", "left", "right")
    sides = ("left", "right")

    def both_run() -> bool:
        rows = table(tmp_path) if (tmp_path / "table.json").exists() else {}
        return all(name in rows and rows[name]["state"] == "running" and rows[name]["tests"] for name in sides)

    wait_for(both_run, 200)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    parts_by_name = table(tmp_path)
    assert process.returncode == 1
    for name in sides:
        assert parts_by_name[name]["state"] == "cut" and "SIGTERM" in parts_by_name[name]["reason"]
        assert [row["name"] for row in parts_by_name[name]["tests"]] == ["a"], "what had ended"
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "work" / name / "pid").read_text()), 0)


def test_parts_by_name_join_the_table_that_is_there(tmp_path: Path) -> None:
    assert start(tmp_path, "--only", "bare").wait(200) == 0
    assert start(tmp_path, "--only", "engine").wait(200) == 0
    expected = [("facts", "passed"), ("bare", "passed"), ("engine", "passed")]
    assert [(part["name"], part["state"]) for part in table(tmp_path).values()] == expected
    unknown = start(tmp_path, "--only", "nothing")
    assert "no part nothing" in unknown.communicate(timeout=200)[0] and unknown.returncode == 2


def test_a_missing_gpu_is_reported() -> None:
    options: Any = {
        "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        "capture_output": True,
        "text": True,
        "timeout": 200,
    }
    done = subprocess.run([sys.executable, "benchmarks/gpu.py"], cwd=ROOT, **options)
    assert done.returncode == 1
    assert "finds no GPU" in done.stderr and "make gpu-rehearsal" in done.stderr


def test_what_training_needs_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without DeepSpeed is not a success; without a rival it may be one."""
    for missing, required in (("deepspeed", True), ("transformers", False)):
        monkeypatch.setattr(run, "find_spec", lambda name, missing=missing: None if name == missing else object())
        missing_modules = run.lacking(parts(), None)
        assert missing_modules.keys() == {missing} and FACTS not in missing_modules[missing]
        assert bool(REQUIRED & missing_modules.keys()) == required


def test_ablations_change_real_keys() -> None:
    """As the step's own command reads them."""
    base = arguments_dump(settings(parse(["--device", "cpu", "--shape", "rehearsal"]), 0))
    changed = 0
    for part in map(rehearsed, ablations()[2:]):
        words = [word for word in part.command[1:] if "{folder}" not in word and word != "--json"]
        values = arguments_dump(settings(parse(words), 0))
        changed += values != base
        assert values != base or part.env or part.name in ("compile: false",), part.name
    assert changed >= 8


@pytest.mark.product
@pytest.mark.timeout(1200)  # three minutes on two quiet cores
def test_rehearsal(tmp_path: Path) -> None:
    """Every part on a CPU; at tiny size those of the 7B shape are the ones of the 1.4B again."""
    names = [part.name for part in parts() if not part.name.startswith("7B shape")]
    words = ["--rehearse", "--minutes", "19", "--only", *names, "--output", str(tmp_path / "table.json")]
    command = [sys.executable, "benchmarks/gpu.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1190)
    assert done.returncode == 0, done.stdout
    rows = table(tmp_path)
    assert list(rows) == names
    assert {part["state"] for part in rows.values()} == {"passed"}, done.stdout


def test_stub_rows_are_what_the_step_writes() -> None:
    assert tuple(eval(STEP.replace("SECONDS", "1.0"))["rows"][0]) == ThroughputRow._fields


def write(folder: Path, kind: str = "gpu") -> Path:
    """A table of what stub parts might have given."""
    measured_rows: dict[str, Any] = {
        "facts": Outcome("facts", "passed", 4.0, result=eval(FACTS_FOUND)),
        "tests": Outcome("tests", "failed", 9.0, "1 of 2 tests failed", tests=[
            {"name": "test_stub.py::test_a", "outcome": "passed", "reason": ""},
            {"name": "test_stub.py::test_b", "outcome": "failed", "reason": "wrong"}]),
        "long": Outcome("long", "left out", reason="no time: it takes about 9999 s"),
        "slow": Outcome("slow", "passed", 9.0, result={"rows": [
            {"experts": "30b", "name": "ours", "seconds": 0.0074, "beside_ours": 1.0}]}),
        "crash": Outcome("crash", "passed", 9.0, result={"rows": [
            {"name": "loss in chunks", "milliseconds": 16.62, "over_floor": 1.304, "peak": 83e7}]}),
        "bare": Outcome("bare", "passed", 40.0, result=eval(STEP.replace("SECONDS", "0.5"))),
        "engine": Outcome("engine", "passed", 41.0, result=eval(STEP.replace("SECONDS", "0.4"))),
    }  # fmt: skip
    path = folder / "2030-01-02-stub.json"
    run_facts = {"kind": kind, "date": "2030-01-02", "commit": "abc", "device": "NVIDIA Stub"}
    results.write(path, run_facts, stub_parts.parts(folder), measured_rows)
    return path


def test_a_table_has_no_path_of_the_machine(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f'File "{ROOT}/benchmarks/gpu.py"\nFile "{sys.prefix}/lib/torch.py"\n')
    assert _tail(log) == 'File "benchmarks/gpu.py"\nFile "lib/torch.py"\n'


def test_what_is_no_result(tmp_path: Path) -> None:
    assert section(Path("/nonexistent")) == NO_RESULTS
    write(tmp_path, kind="rehearsal")
    with pytest.raises(ValueError, match="not of a GPU; delete the file"):
        section(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"parts": []}))
    with pytest.raises(ValueError, match="format"):
        section(tmp_path)


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
    assert "| engine | 2 | 111111.11 | 400.0 | 400.0 | 500.0 | 52.0% | 1.250 of: bare | 31.0 |" in text
    assert "| a block of experts | | ms | speed beside ours |\n|---|---|---:|---:|\n| 30b | ours | 7.4 | 1.00 |" in text
    assert "| loss in chunks | 16.6 | 1.30 | 0.83 |" in text
    assert "- tests: failed, 1 of 2 tests failed: `test_stub.py::test_b`" in text
    assert "- long: left out, no time" in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--check"]) == 0
    path.with_suffix(".png").unlink()
    assert main([*argv, "--check"]) == 1, "a plot is missing"
