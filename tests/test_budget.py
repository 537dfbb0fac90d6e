"""The budget of the suite: what is counted, and that a count above it fails a run."""

import tomllib
from pathlib import Path

import pytest

from tests.budget import BUDGET, Cost, over_budget

pytest_plugins = ["pytester"]
CONFTEST = """
from pathlib import Path
from tests import budget
budget.BUDGET = Path(__file__).with_name("budget.toml")
def pytest_configure(config):
    config.pluginmanager.register(budget.BudgetPlugin(budget.BUDGET), "budget")
"""
STARTING = """
import subprocess
import pytest
from tests.pool import run_ranks
from tests.test_budget import on_a_rank
@pytest.fixture(scope="module")
def two():
    run_ranks(on_a_rank, 2, init=False)
def test_starts_three(two):
    subprocess.run(["true"], check=True)
def test_starts_none(two):
    pass
"""


def on_a_rank(rank: int, world_size: int) -> None:
    """For the pool."""


@pytest.mark.parametrize(
    ("processes", "words", "code"), [(3, (), 0), (2, (), 1), (2, ("-n", "1"), 1), (2, ("-k", "none"), 0)]
)
def test_processes_over_budget_fail_a_whole_target(
    processes: int, words: tuple[str, ...], code: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BUDGET.parents[1]))
    room = pytester.mkdir("tests") / "room"
    room.mkdir()
    (room / "test_one.py").write_text(STARTING)
    (pytester.path / "tests" / "conftest.py").write_text(CONFTEST)
    row = f"minutes = 1, tests = 2, processes = {processes}"
    (pytester.path / "tests" / "budget.toml").write_text(f"[test]\nroom = {{ {row} }}\n")
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *words, "tests")
    assert done.ret == code
    if code or not words:
        done.stdout.fnmatch_lines(["*budget of make test*", f"room * / 1.0 * 2 / 2 * 3 / {processes}"])
    reported = [line for line in done.outlines if line.startswith("OVER BUDGET")]
    line = "OVER BUDGET (tests/budget.toml, [test]): tests/room: 3 processes, budget 2"
    assert reported == ([line] if code else [])


def test_tests_over_budget_and_packages_without_one() -> None:
    costs = {"a": Cost(9.0, 4, 1), "b": Cost(0.0, 1, 0)}
    budget = {"a": {"minutes": 1.0, "tests": 3, "processes": 1}}
    assert over_budget(costs, budget) == ["tests/a: 4 tests, budget 3", "tests/b: 1 tests, budget 0"]
    assert over_budget({"a": Cost(9.0, 3, 1)}, budget) == [], "minutes depend on the machine"


def test_every_package_has_a_budget() -> None:
    rows = tomllib.loads(BUDGET.read_text())["test"]
    outside = {"gpu", "real", "slurm", "soak", "pool"}
    packages = {path.parent.name for path in Path(BUDGET.parent).glob("*/test_*.py")} - outside
    assert packages <= set(rows)
