"""`make gpu` chooses the parts it runs: memory of earlier tables, order, time, and a second run."""

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from benchmarks import gpu
from benchmarks.gpu_run import memory, results, run
from benchmarks.gpu_run.memory import Memory, Pass
from benchmarks.gpu_run.parts import FACTS, PASSED, Part, ablations, parts
from benchmarks.gpu_run.plan import History, Plan, Rank, Step, at_a_time, make_plan, side_by_side, total_seconds
from benchmarks.gpu_run.process import Outcome, Stop
from tests.benchmarks.stub_parts import FACTS_FOUND, STEP
from tests.gpu.outcomes import Outcomes

TODAY, CARD, NEW, OLD = "2030-01-09", "stub", "new", "old"


def part(name: str, seconds: float = 10.0, baseline: str | None = None, tests: bool = False) -> Part:
    return Part(name, "a stub", ("-c", name), seconds, 60.0, baseline=baseline, tests=tests)


def passed(code: str = NEW, date: str = "2030-01-08", card: str = CARD, seconds: float = 10.0) -> Pass:
    return Pass(f"{date}-{card}.json", date, card, code, seconds)


def plan(
    all_parts: Sequence[Part],
    passes: Mapping[str, Sequence[Pass]] | None = None,
    chosen_names: Iterable[str] | None = None,
    width: int = 2,
    limit_s: float = 1000.0,
    rerun: bool = False,
    card: str | None = CARD,
) -> Plan:
    skipped = History(Memory(passes or {}, {}, {}), {item.name: NEW for item in all_parts}, card, TODAY)
    chosen = [item for item in all_parts if chosen_names is None or item.name in chosen_names]
    return make_plan(chosen, {item.name: item for item in all_parts}, skipped, width, limit_s, rerun)


def names(steps: Iterable[Step]) -> list[str]:
    return [step.part.name for step in steps]


def test_what_is_unknown_runs_first() -> None:
    all_parts = [part(name) for name in ("known", "younger", "older", "changed", "without code", "never")]
    passes = {
        "known": [passed()],
        "younger": [passed(card="other", date="2030-01-05")],
        "older": [passed(card="other", date="2030-01-04")],
        "changed": [passed(OLD)],
        "without code": [passed("")],
    }
    made_plan = plan(all_parts, passes)
    assert names(made_plan.timed) == ["never", "changed", "without code", "older", "younger"]
    assert [step.rank for step in made_plan.timed] == [Rank.NEVER_PASSED, *[Rank.CHANGED] * 2, *[Rank.PASSED] * 2]
    assert made_plan.skipped == {"known": "2030-01-08-stub.json"}
    assert names(plan(all_parts, passes, rerun=True).timed) == [*names(made_plan.timed), "known"]
    nowhere = plan(all_parts, passes, card=None)
    assert not nowhere.skipped and "known" in names(nowhere.timed)


def test_code_that_came_back_is_known() -> None:
    assert plan([part("a")], {"a": [passed(OLD), passed(NEW, "2030-01-02")]}).skipped == {"a": "2030-01-02-stub.json"}


@pytest.mark.parametrize("bare", [[passed(date=TODAY)], [], [passed()], [passed(OLD, TODAY)]])
def test_a_part_that_is_compared_brings_its_partner(bare: list[Pass]) -> None:
    """A card's clocks are others in another run."""
    all_parts = [part("engine", baseline="bare"), part("bare")]
    engine_plan = plan(all_parts, {"bare": bare}, chosen_names=["engine"])
    assert names(engine_plan.timed) == ["bare", "engine"] and not engine_plan.skipped
    full_plan = plan(all_parts, {"bare": bare})
    assert sorted(names(full_plan.timed) + list(full_plan.skipped)) == ["bare", "engine"], "once each"


def test_a_partner_counts_in_the_time() -> None:
    all_parts = [part("engine", baseline="bare"), part("bare"), part("other")]
    made_plan = plan(all_parts, {"bare": [passed()]}, limit_s=15.0)
    assert (
        names(made_plan.timed) == ["other"]
        and names(made_plan.deferred) == ["engine"]
        and set(made_plan.skipped) == {"bare"}
    )


def test_the_sum_and_what_does_not_fit() -> None:
    """Two timed parts alone; of tests 40 and then 30 after the 20 that end first: 50 s."""
    all_parts = [part("a", 10), part("t20", 20, tests=True), part("t40", 40, tests=True), part("t30", 30, tests=True),
             part("b", 25), part("too long", 70)]  # fmt: skip
    made_plan = plan(all_parts, {"b": [passed(OLD, seconds=15.0)]}, limit_s=75.0)
    assert names(made_plan.timed) == ["a", "b"], "b takes what it took"
    assert names(made_plan.tests) == ["t40", "t30", "t20"], "the longest first"
    assert made_plan.seconds == 10 + 15 + 50 and names(made_plan.deferred) == ["too long"]
    assert names(plan(all_parts, limit_s=74.0).deferred) == ["b", "too long"]
    output_of = made_plan.lines()
    assert "75" in output_of[0] and any("too long" in line for line in output_of)
    assert side_by_side(made_plan.tests, 1) == total_seconds(made_plan.tests) == 90
    assert [at_a_time(cores) for cores in (1, 2, 8, 16, 64)] == [1, 1, 2, 4, 5]


def test_unknown_tests_run_before_changed_ones_whatever_they_take() -> None:
    all_parts = [part("long", 90, tests=True), part("short", 5, tests=True)]
    assert names(plan(all_parts, {"long": [passed(OLD)]}).tests) == ["short", "long"]


def test_a_slot_of_fifteen_minutes_holds_what_matters() -> None:
    """Nine minutes and then four, on a machine that has never run any part, sixteen cores."""
    all_parts = [item for item in parts() if item.name != FACTS]
    facts = next(item for item in parts() if item.name == FACTS)
    width, ran = at_a_time(16), set()
    for minutes in (9, 4):
        passes = {item.name: [passed(date=TODAY, seconds=item.typical_s)] for item in all_parts if item.name in ran}
        made_plan = plan(all_parts, passes, width=width, limit_s=60 * minutes - facts.typical_s - 2)
        assert set(made_plan.skipped) == ran - set(names(made_plan.timed)), (
            "only what another is compared with stands again"
        )
        ran |= set(names(made_plan.timed) + names(made_plan.tests))
    steps = ("1.4B, native", "1.4B, native, packed", "1.4B, native, FP8", "1.4B, DeepSpeed", "7B shape, native",
             "7B shape, native, FP8")  # fmt: skip
    matters = {"anatomy, 1.4B", "DPO", *steps, *(item.name for item in all_parts if item.tests)}
    assert matters <= ran, matters - ran


def write(folder: Path, name: str, rows: Sequence[Outcome], kind: str = "gpu", date: str = TODAY) -> Path:
    path = folder / name
    description = {"kind": kind, "date": date, "commit": "abc", "device": "NVIDIA Stub"}
    results.write(path, description, [part(row.name) for row in rows], {row.name: row for row in rows})
    return path


def test_tables_are_remembered(tmp_path: Path) -> None:
    def test(name: str, outcome: str) -> dict[str, Any]:
        return {"name": name, "outcome": outcome, "seconds": 1.0, "reason": ""}

    tables = [
        write(tmp_path, "1.json", [Outcome("a", "passed", 5.0), Outcome("c", "failed", 1.0, tests=[
            test("x", "passed"), test("y", "failed")])], date="2030-01-01"),
        write(tmp_path, "2.json", [Outcome("a", "passed", 7.0, code=NEW), Outcome("b", "cut", 3.0), Outcome(
            FACTS, "passed", result=eval(FACTS_FOUND))]),
        write(tmp_path, "3.json", [Outcome("b", "passed", 3.0, code=NEW)], kind="rehearsal"),
    ]  # fmt: skip
    old = json.loads(tables[0].read_text())
    for row in old["parts"]:
        del row["code"]  # which tables of before do not have
    tables[0].write_text(json.dumps(old))
    remembered = memory.remember(tables, "gpu")
    assert remembered.passes["a"] == [
        Pass("2.json", TODAY, CARD, NEW, 7.0),
        Pass("1.json", "2030-01-01", CARD, "", 5.0),
    ]
    assert "b" not in remembered.passes and "c" not in remembered.passes
    assert remembered.tests["c"] == {"x"} and remembered.cores == {CARD: 8}
    assert remembered.seconds(part("a"), CARD) == 7.0 and remembered.seconds(part("a"), "other") == 10.0
    tables[0].write_text("{")
    with pytest.raises(ValueError, match="1.json"):
        memory.remember(tables, "gpu")


def test_the_code_of_a_part_is_its_files_and_its_command(tmp_path: Path) -> None:
    tree = {"tools/a.py": "from megatron.x import y\n", "megatron/__init__.py": "", "megatron/x.py": "y = 1\n",
            "megatron/z.py": "", "tests/gpu/test_a.py": "import tools.a\n", "README.md": "a"}  # fmt: skip
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script, module = part("script"), part("module")
    script = replace(script, command=("tools/a.py", "--json", "README"))
    module = replace(module, command=("-m", "pytest", "tests/gpu/test_a.py::test_b"))
    total_seconds = part("alone")
    all_parts = [script, module, total_seconds]
    assert memory.codes(all_parts, tmp_path) == dict.fromkeys(("script", "module", "alone"), ""), "no git"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def changed(path: str) -> set[str]:
        old_codes = memory.codes(all_parts, tmp_path)
        with open(tmp_path / path, "a") as file:
            file.write("# more\n")
        new_codes = memory.codes(all_parts, tmp_path)
        return {name for name in new_codes if new_codes[name] != old_codes[name]}

    assert changed("megatron/x.py") == {"script", "module"}
    assert changed("tests/gpu/test_a.py") == {"module"}
    assert changed("megatron/z.py") == changed("README.md") == set()
    variants = replace(script, command=(*script.command, "--steps", "2")), replace(script, env={"A": "1"})
    assert len({memory.codes([variant], tmp_path)["script"] for variant in (script, *variants)}) == 3


Machine = Callable[..., tuple[list[str], dict[str, dict[str, Any]]]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Runs parts that take no time, and gives back which began, in order, and the table."""
    monkeypatch.setattr(memory, "codes", lambda all_parts, root: {item.name: item.description for item in all_parts})

    def go(
        all_parts: Sequence[Part],
        minutes: float = 9,
        state: str = "passed",
        chosen_names: Sequence[str] | None = None,
        output: Path | None = None,
    ) -> Any:
        started: list[str] = []

        def run_part(
            item: Part, folder: Path, limit: float, env: object, progress: Callable[[Outcome], None], stop: Stop
        ) -> Outcome:
            started.append(item.name)
            progress(Outcome(item.name, "running"))
            if item.name == FACTS:
                return Outcome(FACTS, "passed", 1.0, result=eval(FACTS_FOUND))
            assert json.loads((folder / PASSED).read_text()) == []
            return Outcome(item.name, state, 1.0, result=eval(STEP.replace("SECONDS", "0.5")))

        monkeypatch.setattr(run, "run_part", run_part)
        options = run.Options("gpu", minutes, chosen_names, False, output, tmp_path / "work", tmp_path)
        status = run.Run([part(FACTS), *all_parts], options, Stop()).all()
        assert status == (0 if state == "passed" else 1)
        path = output or tmp_path / f"{time.strftime('%Y-%m-%d')}-stub.json"
        return started[1:], {row["name"]: row for row in json.loads(path.read_text())["parts"]}

    return go


def test_a_second_run_goes_on_where_the_first_stopped(machine: Machine) -> None:
    all_parts = [part("a", 30), part("b", 30), part("c", 30)]
    started, table = machine(all_parts, minutes=1.2)
    assert started == ["a", "b"] and table["c"]["state"] == "left out" and table["a"]["code"] == "a stub"
    started, table = machine(all_parts, minutes=1.2)
    assert started == ["c"] and {row["state"] for row in table.values()} == {"passed"}
    assert machine(all_parts)[0] == []
    touched = [part("a", 30), replace(part("b", 30), description="another code"), part("c", 30)]
    started, table = machine(touched)
    assert started == ["b"] and table["b"]["code"] == "another code"
    started, table = machine([replace(item, description="changed") for item in all_parts], minutes=0.02)
    assert started == [] and table["a"]["state"] == "passed", "what is left out takes nothing from the table"


def test_timed_parts_run_before_tests_and_the_plan_before_all(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    started, _ = machine([part("t", tests=True), part("a", baseline="b"), part("b")], chosen_names=["t", "a"])
    assert started == ["b", "a", "t"]
    output_of = capsys.readouterr().out
    assert output_of.index("plan:") < output_of.index("begins")


def test_a_part_that_failed_is_unknown(machine: Machine) -> None:
    assert machine([part("a"), part("b")], state="failed", chosen_names=["b"])[0] == ["b"]
    assert machine([part("a"), part("b")])[0] == ["a", "b"]


def test_a_table_elsewhere_begins_with_that_of_the_day(machine: Machine, tmp_path: Path) -> None:
    """The new table replaces the day's."""
    machine([part("a"), part("b")], chosen_names=["a"])
    started, table = machine([part("a"), part("b")], output=tmp_path / "elsewhere" / "table.json")
    assert started == ["b"] and list(table) == [FACTS, "a", "b"]


def test_tests_that_passed_before_run_last(tmp_path: Path) -> None:
    items = [SimpleNamespace(nodeid=f"tests/gpu/test_x.py::test_{letter}") for letter in "abc"]
    Outcomes(tmp_path / "none", frozenset({"test_x.py::test_a"})).pytest_collection_modifyitems(mock.Mock(), items)
    assert [item.nodeid[-1] for item in items] == ["b", "c", "a"]


def test_a_plan_is_printed_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    all_parts = [part(FACTS), part("a"), part("b")]
    digests = memory.codes(all_parts, run.ROOT)
    write(tmp_path, "1.json", [Outcome("a", "passed", 5.0, code=digests["a"]), Outcome(
        FACTS, "passed", result=eval(FACTS_FOUND))])  # fmt: skip
    monkeypatch.setattr(gpu, "parts", lambda: all_parts)
    monkeypatch.setattr(gpu, "TABLES", tmp_path)
    monkeypatch.setattr(run, "ask_nvidia_smi", lambda field: None)
    monkeypatch.setattr(run, "run_part", mock.Mock(side_effect=AssertionError("nothing runs")))

    def output_of(*argv: str) -> str:
        assert gpu.main(["--plan", *argv]) == 0
        return capsys.readouterr().out

    assert (
        "a: 1.json" in output_of("--card", "stub") and "card unknown" in output_of() and "a: 1.json" not in output_of()
    )
    with pytest.raises(SystemExit):
        gpu.main(["--card", "stub"])


def test_a_part_stands_once() -> None:
    for part_list in (parts(), ablations()):
        names = [part.name for part in part_list]
        assert len(names) == len(set(names))
