"""How the suite itself is run: what a change selects, what is printed of seconds, and second runs."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.neox_arguments.methods import METHODS
from tests import budget, last_run, selection
from tests.budget import over_budget, table
from tests.import_graph import ImportGraph
from tests.last_run import FullRun, changed_files, read_record, write_record
from tests.selection import select, select_changed

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[1]

TREE = {
    "megatron/__init__.py": "",
    "megatron/data/__init__.py": "from megatron.data.packing import pack\nfrom megatron.data.labels import shift\n",
    "megatron/data/packing.py": "def pack(): ...\n",
    "megatron/data/labels.py": "def shift():\n    from megatron.data.ends import end\n",
    "megatron/data/ends.py": "end = 0\n",
    "megatron/losses/__init__.py": "",
    "megatron/losses/pairs.py": 'TOLD = "see python deepy.py train.py"\n',
    "megatron/losses/choice.py": 'from importlib import import_module\nname = "pairs"\n'
    'import_module(f"megatron.losses.{name}")\n',
    "deepy.py": "import megatron.data.packing\n",
    "configs/small.yml": "seed: 1\n",
    "docs/launch.md": "",
    "tests/conftest.py": "import deepy\n",
    "tests/test_pack.py": "from megatron.data import pack\n",
    "tests/test_labels.py": "from megatron.data import shift\n",
    "tests/test_losses.py": "import megatron.losses.choice\n",
    "tests/test_command.py": 'START = "python deepy.py small.yml"\nPAGES = ("docs",)\n',
    "tests/room/conftest.py": "from tests.room.runs import run\n",
    "tests/room/runs.py": "import megatron.data.ends\ndef run(): ...\n",
    "tests/room/test_room.py": "",
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository of TREE."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "files"),
    [
        ("megatron/data/packing.py", ["test_command", "test_pack"]),  # not who imports another name of the package
        ("megatron/data/labels.py", ["test_labels"]),
        ("megatron/data/ends.py", ["test_labels", "room/test_room"]),  # inside a function; by the room's conftest
        ("megatron/losses/pairs.py", ["test_losses"]),  # by a name made at run time
        ("megatron/data/__init__.py", ["room/test_room", "test_command", "test_labels", "test_pack"]),
        ("deepy.py", ["test_command"]),  # a command in a string; a message that names it starts nothing
        ("configs/small.yml", ["test_command"]),
        ("docs/launch.md", ["test_command"]),
        ("tests/room/runs.py", ["room/test_room"]),
        ("tests/test_pack.py", ["test_pack"]),
        ("LICENSE", []),
    ],
)
def test_files_that_a_change_touches(tree: Path, changed: str, files: list[str]) -> None:
    selected = select(tree, [changed]).files
    assert selected is not None and sorted(selected) == sorted(f"tests/{name}.py" for name in files)


def test_nearest_files_come_first(tree: Path) -> None:
    (tree / "tests/test_ends.py").write_text("from megatron.data.ends import end\n")
    assert (select(tree, ["megatron/data/ends.py"]).files or [])[0] == "tests/test_ends.py"


def test_everything_runs_where_the_base_says_nothing(tree: Path) -> None:
    head = commit(tree)
    assert select_changed(FullRun(), tree).files is None
    assert select_changed(FullRun("0" * 40), tree).files is None
    assert select(tree, ["tests/pool/server.py"]).files is None
    assert select_changed(FullRun(head), tree).files == []


def test_what_changed(tree: Path) -> None:
    head = commit(tree)
    (tree / "new file.py").write_text("")
    (tree / "megatron/data/ends.py").unlink()
    git(tree, "mv", "deepy.py", "neox.py")
    expected = ["deepy.py", "megatron/data/ends.py", "neox.py", "new file.py"]
    assert changed_files(head, tree) == expected
    commit(tree)
    assert changed_files(head, tree) == expected


def test_this_tree() -> None:
    """Rooms above training are not seen from its tests, nor all of a package from one name of it."""
    graph = ImportGraph.of(ROOT)
    gates, layers = (set(graph.dependents([f"megatron/{name}.py"])) for name in ("pipelines/gates", "mpu/layers"))
    assert "tests/pipelines/test_gates.py" in gates and "tests/training/test_layouts.py" in layers - gates


CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.budget import BudgetPlugin
from tests.last_run import read_record
from tests.retry import RetryPlugin
from tests import budget, last_run, selection

def pytest_addoption(parser):
    parser.addoption("--changed", action="store_true")
    parser.addoption("--record", action="store_true")

def pytest_configure(config):
    for mark in ("more", "ends_processes"):
        config.addinivalue_line("markers", mark)
    here = Path(__file__).parent
    budget.TESTS = here
    config.pluginmanager.register(BudgetPlugin(here / "budget.toml", here / "last_full_run.json", {folder!r}), "budget")
    config.pluginmanager.register(RetryPlugin(), "retry")
    if config.getoption("changed"):
        record = read_record(here / "last_full_run.json")
        config.pluginmanager.register(selection.SelectionPlugin(record, here.parent), "selection")
"""
A_TEST = "def test_cheap(): pass\ndef test_dear(): pass\n"
A_MORE = """
import pytest
READS = "megatron/data/ends.py"
@pytest.mark.more
def test_more(): pass
def test_cheap(): pass
"""
"""Selected where ends.py changes: its one long test."""


@pytest.fixture
def suite(tree: Path, pytester: pytest.Pytester) -> Path:
    """A suite with the plugins, in a repository: one cheap and one expensive test, one `more`, a budget."""
    for path in [*tree.glob("tests/*.py"), tree / "tests/room"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tree / "tests/room").mkdir()
    (tree / "tests/room/test_one.py").write_text(A_TEST)
    (tree / "tests/room/test_two.py").write_text(A_MORE)
    (tree / "tests/conftest.py").write_text(CONFTEST.format(root=str(ROOT), folder=str(tree)))
    (tree / "tests/budget.toml").write_text("[ordinary]\nroom = 0\n[more]\nroom = 60\n")
    (tree / ".gitignore").write_text("__pycache__\n")
    record = FullRun(commit(tree), [], {}, {"tests/room/test_one.py::test_dear": 9.0})
    write_record(record, tree / "tests/last_full_run.json")
    commit(tree)
    pytester.chdir()
    return tree


def run_suite(pytester: pytest.Pytester, suite: Path, *words: str) -> pytest.RunResult:
    options = ("-p", "no:cacheprovider", "--rootdir", str(suite), str(suite / "tests"))
    return pytester.runpytest_subprocess(*words, *options)


@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["one process", "workers"])
def test_only_what_changed_of_the_long_tests_runs(
    suite: Path, pytester: pytest.Pytester, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(suite))
    run_suite(pytester, suite, "--changed", *words).assert_outcomes(passed=2)
    (suite / "megatron/data/ends.py").write_text("end = 1\n")
    done = run_suite(pytester, suite, "--changed", *words)
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(["*tests left out*", "1 tests of 1 files*", "  tests/room/test_one.py: 1"])
    (suite / "pyproject.toml").write_text("")
    done = run_suite(pytester, suite, "--changed", *words)
    done.assert_outcomes(passed=4)
    done.stdout.fnmatch_lines(["none: pyproject.toml changed*"])


def test_what_failed_there_is_not_left_out(
    suite: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(suite))
    file = suite / "tests/last_full_run.json"
    write_record(replace(read_record(file), failed=["tests/room/test_one.py::test_dear"]), file)
    run_suite(pytester, suite, "--changed").assert_outcomes(passed=3)


@pytest.mark.more
def test_a_full_run_is_recorded(suite: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(suite))
    file, head = suite / "tests/last_full_run.json", git(suite, "rev-parse", "HEAD")
    original = file.read_text()
    done = run_suite(pytester, suite, "--record", "-n", "1")
    done.assert_outcomes(passed=4)
    done.stdout.fnmatch_lines(["*seconds of a worker*", "*seconds*last full*budget*", "more room*", "ordinary room*"])
    record = json.loads(file.read_text())
    assert record["commit"] == head and record["expensive"] == {} and set(record["seconds"]) == {"more", "ordinary"}
    assert record["failed"] == []
    file.write_text(original)
    test_file = suite / "tests/room/test_one.py"
    for content, words in (("", ("-k", "more")), ("1 / 0\n", ())):  # a part, and a file that cannot be imported
        test_file.write_text(content)
        commit(suite)
        run_suite(pytester, suite, "--record", *words)
        assert file.read_text() == original
    test_file.write_text("def test_cheap(): assert False\n")
    run_suite(pytester, suite, "--record")  # the file differs from the commit
    assert file.read_text() == original
    head = commit(suite)
    run_suite(pytester, suite, "--record")
    record = json.loads(file.read_text())
    assert record["commit"] == head and record["failed"] == ["tests/room/test_one.py::test_cheap"]


def test_budgets_warn() -> None:
    seconds = {"ordinary": {"a": 9.0, "b": 1.0}, "more": {"a": 2.0}}
    limits = {"ordinary": {"a": 8, "b": 1}, "more": {"a": 2}}
    assert [line.split(":")[0] for line in over_budget(seconds, limits)] == ["tests/a, ordinary"]
    assert [line.split()[-3:] for line in table(seconds, {"more": {"a": 3}}, limits)[1:]] == [
        ["2", "3", "2"], ["2", "3", "2"], ["9", "0", "8"], ["1", "0", "1"], ["10", "0", "9"],
    ]  # fmt: skip


FLAKY = """
import os, pytest
@pytest.fixture
def place(tmp_path):
    yield tmp_path
@pytest.mark.ends_processes
def test_fails_once(place):
    name = "{seen}"
    if not os.path.exists(name):
        open(name, "w").close()
        assert 1 == 2
@pytest.mark.ends_processes
def test_fails_twice(): assert 3 == 4
def test_has_no_second_run(): assert 5 == 6
"""


FORKED = """
import os, signal, time, pytest
seen = []
@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory): return tmp_path_factory.mktemp("place")
def test_one(): seen.append(os.getpid()); print(os.getpid(), os.getppid())
def test_two(place): assert not seen and place.is_dir()
def test_fails(): assert 3 == 4
def test_skips(): pytest.skip("for a reason")
def test_killed():
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
def test_leaves(): os._exit(0)
@pytest.mark.timeout(1)
def test_hangs(): time.sleep(200)
def test_afterwards(): pass
"""


def test_each_test_in_a_process_of_its_own(pytester: pytest.Pytester) -> None:
    """Module state is not shared, and a test that ends its process fails alone."""
    pytester.makepyfile(test_forked=FORKED)
    plugin = "import pytest; from tests.forked import ForkedPlugin"
    register = "def pytest_configure(config): config.pluginmanager.register(ForkedPlugin())"
    pytester.makeconftest(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{plugin}\n{register}")
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=3, failed=4, skipped=1)
    done.stdout.fnmatch_lines([
        "*assert 3 == 4*", "*ended by SIGKILL*", "last words", "*ended by exit status 0*", "*Timeout*1*",
    ])  # fmt: skip


@pytest.mark.parametrize("words", [(), ("-n", "1")], ids=["one process", "workers"])
def test_second_runs_are_counted(
    suite: Path, pytester: pytest.Pytester, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(suite))
    (suite / "tests/room/test_one.py").write_text(FLAKY.format(seen=suite / "seen"))
    done = run_suite(pytester, suite, "-k", "test_one", *words)
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(["*2 tests needed*", "*test_fails_once: *1 == 2*", "*test_fails_twice*3 == 4*"])


def test_every_room_has_a_budget() -> None:
    import tomllib

    limits = tomllib.loads(budget.BUDGET.read_text())["ordinary"]
    excluded = {"gpu", "real", "slurm"}
    rooms = {budget.room_of(str(path.relative_to(ROOT))) for path in ROOT.glob("tests/**/test_*.py")} - excluded
    assert rooms <= set(limits)


def test_the_record_names_existing_tests() -> None:
    """A renamed test is none that is known to be expensive: it runs always, until the next full run."""
    record = read_record()
    assert all(name.startswith("tests/") for name in record.expensive)
    assert selection.TEST_FILE.fullmatch("tests/test_suite.py") and last_run.RECORD.parent == ROOT / "tests"


def test_tests_name_every_kind_of_training() -> None:
    """A list beside the tests names its method and declaration, which no test imports."""
    texts = [path.read_text() for path in ROOT.glob("tests/**/conftest.py")]
    modules = {name for text in texts for name in re.findall(r"megatron\.methods[.\w]+", text)}
    parts = {f"megatron.methods.{name}.{part}" for name in METHODS for part in ("method", "declaration")}
    assert parts <= modules, parts - modules
