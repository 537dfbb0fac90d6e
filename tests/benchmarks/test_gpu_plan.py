"""What `make gpu` runs and what it leaves out: memory of earlier tables, order, time, and a second run."""

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
from benchmarks.gpu_run.plan import Known, Plan, Rank, Step, alone, at_a_time, make_plan, side_by_side
from benchmarks.gpu_run.process import Outcome, Stop
from tests.benchmarks.stub_parts import FACTS_FOUND, STEP
from tests.gpu.outcomes import Outcomes

TODAY, CARD, NEW, OLD = "2030-01-09", "stub", "new", "old"


def part(name: str, seconds: float = 10.0, beside: str | None = None, tests: bool = False) -> Part:
    return Part(name, "a stub", ("-c", name), seconds, 60.0, beside=beside, tests=tests)


def passed(code: str = NEW, date: str = "2030-01-08", card: str = CARD, seconds: float = 10.0) -> Pass:
    return Pass(f"{date}-{card}.json", date, card, code, seconds)


def plan(
    every: Sequence[Part],
    passes: Mapping[str, Sequence[Pass]] | None = None,
    only: Iterable[str] | None = None,
    width: int = 2,
    limit_s: float = 1000.0,
    again: bool = False,
    card: str | None = CARD,
) -> Plan:
    known = Known(Memory(passes or {}, {}, {}), {one.name: NEW for one in every}, card, TODAY)
    chosen = [one for one in every if only is None or one.name in only]
    return make_plan(chosen, {one.name: one for one in every}, known, width, limit_s, again)


def names(steps: Iterable[Step]) -> list[str]:
    return [step.part.name for step in steps]


def test_what_is_unknown_runs_first() -> None:
    every = [part(name) for name in ("known", "younger", "older", "changed", "without code", "never")]
    passes = {
        "known": [passed()],
        "younger": [passed(card="other", date="2030-01-05")],
        "older": [passed(card="other", date="2030-01-04")],
        "changed": [passed(OLD)],
        "without code": [passed("")],
    }
    made = plan(every, passes)
    assert names(made.timed) == ["never", "changed", "without code", "older", "younger"]
    assert [step.rank for step in made.timed] == [Rank.NEVER_PASSED, *[Rank.CHANGED] * 2, *[Rank.PASSED] * 2]
    assert made.known == {"known": "2030-01-08-stub.json"}
    assert names(plan(every, passes, again=True).timed) == [*names(made.timed), "known"]
    nowhere = plan(every, passes, card=None)
    assert not nowhere.known and "known" in names(nowhere.timed)


def test_code_that_came_back_is_known() -> None:
    assert plan([part("a")], {"a": [passed(OLD), passed(NEW, "2030-01-02")]}).known == {"a": "2030-01-02-stub.json"}


@pytest.mark.parametrize("bare", [[passed(date=TODAY)], [], [passed()], [passed(OLD, TODAY)]])
def test_a_part_that_is_compared_brings_its_partner(bare: list[Pass]) -> None:
    """A card's clocks are others in another run."""
    every = [part("engine", beside="bare"), part("bare")]
    made = plan(every, {"bare": bare}, only=["engine"])
    assert names(made.timed) == ["bare", "engine"] and not made.known
    both = plan(every, {"bare": bare})
    assert sorted(names(both.timed) + list(both.known)) == ["bare", "engine"], "once each"


def test_a_partner_counts_in_the_time() -> None:
    every = [part("engine", beside="bare"), part("bare"), part("other")]
    made = plan(every, {"bare": [passed()]}, limit_s=15.0)
    assert names(made.timed) == ["other"] and names(made.late) == ["engine"] and set(made.known) == {"bare"}


def test_the_sum_and_what_does_not_fit() -> None:
    """Two timed parts alone; of tests 40 and then 30 after the 20 that end first: 50 s."""
    every = [part("a", 10), part("t20", 20, tests=True), part("t40", 40, tests=True), part("t30", 30, tests=True),
             part("b", 25), part("too long", 70)]  # fmt: skip
    made = plan(every, {"b": [passed(OLD, seconds=15.0)]}, limit_s=75.0)
    assert names(made.timed) == ["a", "b"], "b takes what it took"
    assert names(made.tests) == ["t40", "t30", "t20"], "the longest first"
    assert made.seconds == 10 + 15 + 50 and names(made.late) == ["too long"]
    assert names(plan(every, limit_s=74.0).late) == ["b", "too long"]
    said = made.lines()
    assert "75" in said[0] and any("too long" in line for line in said)
    assert side_by_side(made.tests, 1) == alone(made.tests) == 90
    assert [at_a_time(cores) for cores in (1, 2, 8, 16, 64)] == [1, 1, 2, 4, 5]


def test_unknown_tests_run_before_changed_ones_whatever_they_take() -> None:
    every = [part("long", 90, tests=True), part("short", 5, tests=True)]
    assert names(plan(every, {"long": [passed(OLD)]}).tests) == ["short", "long"]


def test_a_slot_of_fifteen_minutes_holds_what_matters() -> None:
    """Nine minutes and then four, on a machine that has never run any part, sixteen cores."""
    every = [one for one in parts() if one.name != FACTS]
    facts = next(one for one in parts() if one.name == FACTS)
    width, ran = at_a_time(16), set()
    for minutes in (9, 4):
        passes = {one.name: [passed(date=TODAY, seconds=one.typical_s)] for one in every if one.name in ran}
        made = plan(every, passes, width=width, limit_s=60 * minutes - facts.typical_s - 2)
        assert set(made.known) == ran - set(names(made.timed)), "only what another is compared with stands again"
        ran |= set(names(made.timed) + names(made.tests))
    steps = ("1.4B, native", "1.4B, native, packed", "1.4B, native, FP8", "1.4B, DeepSpeed", "7B shape, native",
             "7B shape, native, FP8")  # fmt: skip
    matters = {"anatomy, 1.4B", "DPO", *steps, *(one.name for one in every if one.tests)}
    assert matters <= ran, matters - ran


def write(folder: Path, name: str, rows: Sequence[Outcome], kind: str = "gpu", date: str = TODAY) -> Path:
    path = folder / name
    about = {"kind": kind, "date": date, "commit": "abc", "device": "NVIDIA Stub"}
    results.write(path, about, [part(row.name) for row in rows], {row.name: row for row in rows})
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
    found = memory.remember(tables, "gpu")
    assert found.passes["a"] == [Pass("2.json", TODAY, CARD, NEW, 7.0), Pass("1.json", "2030-01-01", CARD, "", 5.0)]
    assert "b" not in found.passes and "c" not in found.passes
    assert found.tests["c"] == {"x"} and found.cores == {CARD: 8}
    assert found.seconds(part("a"), CARD) == 7.0 and found.seconds(part("a"), "other") == 10.0
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
    alone = part("alone")
    every = [script, module, alone]
    assert memory.codes(every, tmp_path) == dict.fromkeys(("script", "module", "alone"), ""), "no git"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def changed(path: str) -> set[str]:
        before = memory.codes(every, tmp_path)
        with open(tmp_path / path, "a") as file:
            file.write("# more\n")
        after = memory.codes(every, tmp_path)
        return {name for name in after if after[name] != before[name]}

    assert changed("megatron/x.py") == {"script", "module"}
    assert changed("tests/gpu/test_a.py") == {"module"}
    assert changed("megatron/z.py") == changed("README.md") == set()
    other = replace(script, command=(*script.command, "--steps", "2")), replace(script, env={"A": "1"})
    assert len({memory.codes([one], tmp_path)["script"] for one in (script, *other)}) == 3


Machine = Callable[..., tuple[list[str], dict[str, dict[str, Any]]]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Runs parts that take no time, and gives back which began, in order, and the table."""
    monkeypatch.setattr(memory, "codes", lambda every, root: {one.name: one.about for one in every})

    def go(
        every: Sequence[Part],
        minutes: float = 9,
        state: str = "passed",
        only: Sequence[str] | None = None,
        output: Path | None = None,
    ) -> Any:
        begun: list[str] = []

        def run_part(
            one: Part, folder: Path, limit: float, env: object, progress: Callable[[Outcome], None], stop: Stop
        ) -> Outcome:
            begun.append(one.name)
            progress(Outcome(one.name, "running"))
            if one.name == FACTS:
                return Outcome(FACTS, "passed", 1.0, result=eval(FACTS_FOUND))
            assert json.loads((folder / PASSED).read_text()) == []
            return Outcome(one.name, state, 1.0, result=eval(STEP.replace("SECONDS", "0.5")))

        monkeypatch.setattr(run, "run_part", run_part)
        options = run.Options("gpu", minutes, only, False, output, tmp_path / "work", tmp_path)
        status = run.Run([part(FACTS), *every], options, Stop()).all()
        assert status == (0 if state == "passed" else 1)
        path = output or tmp_path / f"{time.strftime('%Y-%m-%d')}-stub.json"
        return begun[1:], {row["name"]: row for row in json.loads(path.read_text())["parts"]}

    return go


def test_a_second_run_goes_on_where_the_first_stopped(machine: Machine) -> None:
    every = [part("a", 30), part("b", 30), part("c", 30)]
    begun, table = machine(every, minutes=1.2)
    assert begun == ["a", "b"] and table["c"]["state"] == "left out" and table["a"]["code"] == "a stub"
    begun, table = machine(every, minutes=1.2)
    assert begun == ["c"] and {row["state"] for row in table.values()} == {"passed"}
    assert machine(every)[0] == []
    touched = [part("a", 30), replace(part("b", 30), about="another code"), part("c", 30)]
    begun, table = machine(touched)
    assert begun == ["b"] and table["b"]["code"] == "another code"
    begun, table = machine([replace(one, about="changed") for one in every], minutes=0.02)
    assert begun == [] and table["a"]["state"] == "passed", "what is left out takes nothing from the table"


def test_timed_parts_run_before_tests_and_the_plan_before_all(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, _ = machine([part("t", tests=True), part("a", beside="b"), part("b")], only=["t", "a"])
    assert begun == ["b", "a", "t"]
    said = capsys.readouterr().out
    assert said.index("plan:") < said.index("begins")


def test_a_part_that_failed_is_unknown(machine: Machine) -> None:
    assert machine([part("a"), part("b")], state="failed", only=["b"])[0] == ["b"]
    assert machine([part("a"), part("b")])[0] == ["a", "b"]


def test_a_table_elsewhere_begins_with_that_of_the_day(machine: Machine, tmp_path: Path) -> None:
    """It is brought back in place of that one."""
    machine([part("a"), part("b")], only=["a"])
    begun, table = machine([part("a"), part("b")], output=tmp_path / "elsewhere" / "table.json")
    assert begun == ["b"] and list(table) == [FACTS, "a", "b"]


def test_tests_that_passed_before_run_last(tmp_path: Path) -> None:
    items = [SimpleNamespace(nodeid=f"tests/gpu/test_x.py::test_{letter}") for letter in "abc"]
    Outcomes(tmp_path / "none", frozenset({"test_x.py::test_a"})).pytest_collection_modifyitems(mock.Mock(), items)
    assert [item.nodeid[-1] for item in items] == ["b", "c", "a"]


def test_a_plan_is_printed_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [part(FACTS), part("a"), part("b")]
    digests = memory.codes(every, run.ROOT)
    write(tmp_path, "1.json", [Outcome("a", "passed", 5.0, code=digests["a"]), Outcome(
        FACTS, "passed", result=eval(FACTS_FOUND))])  # fmt: skip
    monkeypatch.setattr(gpu, "parts", lambda: every)
    monkeypatch.setattr(gpu, "TABLES", tmp_path)
    monkeypatch.setattr(run, "ask_nvidia_smi", lambda field: None)
    monkeypatch.setattr(run, "run_part", mock.Mock(side_effect=AssertionError("nothing runs")))

    def said(*argv: str) -> str:
        assert gpu.main(["--plan", *argv]) == 0
        return capsys.readouterr().out

    assert "a: 1.json" in said("--card", "stub") and "card unknown" in said() and "a: 1.json" not in said()
    with pytest.raises(SystemExit):
        gpu.main(["--card", "stub"])


def test_a_part_stands_once() -> None:
    for every in (parts(), ablations()):
        names = [part.name for part in every]
        assert len(names) == len(set(names))
