"""Processes that wait beside the ranks and become the ranks of the next start."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.launch.ranks import Rank
from megatron.launch.spares import SpareRanks
from tests.launch.runs import alive, deepy

pytestmark = pytest.mark.ends_processes
# Each process that imports `witness` leaves its pid. Rank 0 reports its imports, as after a first step.
# Rank 1 dies once two spares have imported `witness` too.
WITNESS = """
import os
from pathlib import Path
from typing import Any
Path(f"imported_by_{os.getpid()}").touch()
"""
SCRIPT = """
from megatron.process.spare import report_imports
sys.path.insert(0, str(Path("elsewhere").resolve()))
import witness
names = ("RANK", "MASTER_PORT", "NEOX_RESTARTS", "NEOX_RESTART_CAUSE")
facts = {"pid": os.getpid(), "argv": sys.argv[1:], "main": __name__, "file": __file__,
         "is_spare": "-c" in sys.orig_argv,
         "inherited": os.environ.get("OWN_SERVICE"), "has_to_report": "NEOX_IMPORTS_FILE" in os.environ,
         **{name: os.environ[name] for name in names}}
Path(f"facts_{rank}_{start}.json").write_text(__import__("json").dumps(facts))
os.environ["OWN_SERVICE"] = "of this process"
if rank == 0:
    report_imports()
if start < LAST:
    while len(list(Path(".").glob("imported_by_*"))) < 4 + 2 * start:
        time.sleep(0.01)
    PREPARE
    os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)
"""


def run(folder: Path, *words: str, last: int = 1, prepare: str = "pass") -> tuple[int, str, list[dict[str, object]]]:
    """Returns the exit code, the log, and what fact rank of fact start has noted, the starts in order."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "witness.py").write_text(WITNESS)
    done = deepy(folder, SCRIPT.replace("LAST", str(last)).replace("PREPARE", prepare), "--max-restarts", "2", *words)
    facts = [json.loads(path.read_text()) for path in folder.glob("facts_*.json")]
    return done.returncode, done.stdout, sorted(facts, key=lambda fact: (fact["NEOX_RESTARTS"], fact["RANK"]))


def importers(folder: Path) -> set[int]:
    return {int(path.name.rpartition("_")[2]) for path in folder.glob("imported_by_*")}


def test_spares_become_the_ranks_of_the_next_start_and_have_new_spares(tmp_path: Path) -> None:
    code, log, facts = run(tmp_path, last=2)
    assert code == 0, log
    assert [(fact["NEOX_RESTARTS"], fact["RANK"]) for fact in facts] == [(s, r) for s in "012" for r in "01"]
    assert [fact["is_spare"] for fact in facts] == [False] * 2 + [True] * 4
    assert len(importers(tmp_path)) == 6 == len({fact["pid"] for fact in facts}), "no process began after a failure"
    assert importers(tmp_path) == {fact["pid"] for fact in facts}
    starts = [facts[:2], facts[2:4], facts[4:]]
    for first_rank, second_rank in starts:
        assert first_rank["MASTER_PORT"] == second_rank["MASTER_PORT"]
        assert (first_rank["main"], Path(str(first_rank["file"])).name) == ("__main__", "script.py")
        assert first_rank["argv"] == facts[0]["argv"]
    assert all(fact["inherited"] is None for fact in facts), "a service of another process is none of a spare"
    assert len({start[0]["MASTER_PORT"] for start in starts}) == 3
    assert facts[0]["NEOX_RESTART_CAUSE"] == "" and all("SIGKILL" in str(e["NEOX_RESTART_CAUSE"]) for e in facts[2:])
    assert [fact["has_to_report"] for fact in facts] == [True] * 4 + [False] * 2, "nothing follows the last start"
    assert not any(alive(pid) for pid in importers(tmp_path))


def test_a_spare_that_has_ended_is_replaced_by_a_new_process(tmp_path: Path) -> None:
    kill_spares = """
    for path in Path(".").glob("imported_by_*") if rank == 1 else ():
        pid = int(path.name.rpartition("_")[2])
        if b"wait(" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, 9)
            while "State:\\tZ" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.01)
"""
    code, log, facts = run(tmp_path, prepare=kill_spares.strip())
    assert code == 0, log
    assert re.findall(r"become rank (\d) has ended", log) == ["0", "1"]
    assert [fact["is_spare"] for fact in facts] == [False] * 4


def test_code_that_has_changed_is_run_by_new_processes(tmp_path: Path) -> None:
    change = "time.sleep(0.01), Path('script.py').touch() if rank == 1 else None"
    code, log, facts = run(tmp_path, prepare=change)
    assert code == 0, log
    assert [fact["is_spare"] for fact in facts] == [False] * 4


def test_without_spare_ranks_every_rank_is_a_new_process(tmp_path: Path) -> None:
    prepare = "assert 'NEOX_IMPORTS_FILE' not in os.environ"
    script = SCRIPT.replace("< 4 + 2 * start", "< 2").replace("LAST", "1").replace("PREPARE", prepare)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "witness.py").write_text(WITNESS)
    done = deepy(tmp_path, script, "--max-restarts", "2", "--set", "spare_ranks=false")
    assert done.returncode == 0, done.stdout
    assert len(importers(tmp_path)) == 4 and "restart 1 of 2" in done.stdout


def test_a_machine_that_starts_no_more_processes_goes_on_without_spares(monkeypatch: Any, capsys: Any) -> None:
    def fail(*words: Any, **options: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("megatron.launch.spares.start_rank", fail)
    spares, rank = SpareRanks(), Rank(0, 1, None, 0, None)  # type: ignore[arg-type]
    (path,) = spares.begin_start().values()
    Path(path).write_text("{}")
    for _ in range(3):
        spares.renew(("python", "-u", "script.py"), [{"RANK": "0"}], [rank])
    spares.close()
    assert capsys.readouterr().err.count("Resource temporarily unavailable") == 1 and not Path(path).exists()
