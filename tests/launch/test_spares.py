"""Processes that wait beside the ranks and become the ranks of the next start."""

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.launch.ranks import Rank
from megatron.launch.spares import SpareRanks
from tests.launch.runs import alive, deepy

pytestmark = pytest.mark.ends_processes
# Each process that imports `witness` leaves its pid. Rank 0 reports its imports, as after a first step.
# Rank 1 dies once two spares wait that have imported `witness` too.
WITNESS = """
import os, threading, time
from pathlib import Path
from typing import Any
Path(f"imported_by_{os.getpid()}").touch()
"""
THREAD = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
SCRIPT = """
from megatron.process.spare import report_imports
sys.path.insert(0, str(Path("elsewhere").resolve()))
import witness
names = ("RANK", "MASTER_PORT", "NEOX_RESTARTS", "NEOX_RESTART_CAUSE")
facts = {"pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv[1:], "main": __name__, "file": __file__,
         "is_spare": "-c" in sys.orig_argv, "named": Path("/proc/self/comm").read_text().strip(),
         "inherited": os.environ.get("OWN_SERVICE"), "has_to_report": "NEOX_IMPORTS_FILE" in os.environ,
         **{name: os.environ[name] for name in names}}
Path(f"facts_{rank}_{start}.json").write_text(__import__("json").dumps(facts))
os.environ["OWN_SERVICE"] = "of this process"
if rank == 0:
    report_imports()
if start < LAST:
    def spares():
        for path in Path(".").glob("imported_by_*"):
            try:
                if Path(f"/proc/{path.name.rpartition('_')[2]}/comm").read_text() == "spare\\n":
                    yield path
            except OSError:
                pass
    while len(list(spares())) < EXPECTED:
        time.sleep(0.01)
    PREPARE
    os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)
"""


def run(
    folder: Path, *words: str, last: int = 1, prepare: str = "pass", imported: str = "", spares: int = 2
) -> tuple[int, str, list[dict[str, object]]]:
    """Returns the exit code, the log, and what each rank of each start has noted, the starts in order.

    prepare: code before the failure. imported: code of a module that ranks and spares import. spares: those
    that have to wait before the failure.
    """
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "witness.py").write_text(WITNESS + imported)
    script = SCRIPT.replace("LAST", str(last)).replace("PREPARE", prepare).replace("EXPECTED", str(spares))
    done = deepy(folder, script, "--max-restarts", "2", *words)
    facts = [json.loads(path.read_text()) for path in folder.glob("facts_*.json")]
    return done.returncode, done.stdout, sorted(facts, key=lambda fact: (fact["NEOX_RESTARTS"], fact["RANK"]))


def importers(folder: Path) -> set[int]:
    return {int(path.name.rpartition("_")[2]) for path in folder.glob("imported_by_*")}


@pytest.mark.parametrize("forks", [True, False], ids=["forks", "threads"])
def test_spares_make_the_ranks_of_the_next_starts(forks: bool, tmp_path: Path) -> None:
    """Forks of the same spares; a spare with a thread, which no fork would have, becomes the rank."""
    code, log, facts = run(tmp_path, last=2, imported="" if forks else THREAD)
    assert code == 0, log
    assert [(fact["NEOX_RESTARTS"], fact["RANK"]) for fact in facts] == [(s, r) for s in "012" for r in "01"]
    assert [fact["is_spare"] for fact in facts] == [False] * 2 + [True] * 4
    pids = {int(str(fact["pid"])) for fact in facts}
    assert len(pids) == 6 and len(importers(tmp_path)) == (4 if forks else 6), "nothing was imported after a failure"
    assert pids & importers(tmp_path) == ({int(str(fact["pid"])) for fact in facts[:2]} if forks else pids)
    assert len({fact["parent"] for fact in facts}) == 1 and "spare" not in {fact["named"] for fact in facts}
    starts = [facts[:2], facts[2:4], facts[4:]]
    for first_rank, second_rank in starts:
        assert first_rank["MASTER_PORT"] == second_rank["MASTER_PORT"]
        assert (first_rank["main"], Path(str(first_rank["file"])).name) == ("__main__", "script.py")
        assert first_rank["argv"] == facts[0]["argv"]
    assert all(fact["inherited"] is None for fact in facts), "a service of another process is none of a spare"
    assert len({start[0]["MASTER_PORT"] for start in starts}) == 3
    assert facts[0]["NEOX_RESTART_CAUSE"] == "" and all("SIGKILL" in str(e["NEOX_RESTART_CAUSE"]) for e in facts[2:])
    assert [fact["has_to_report"] for fact in facts] == [True] * 4 + [False] * 2, "nothing follows the last start"
    assert not any(alive(pid) for pid in importers(tmp_path) | pids)


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


@pytest.mark.parametrize("file", ["script.py", "elsewhere/witness.py"])
def test_code_that_has_changed_is_run_by_new_processes(file: str, tmp_path: Path) -> None:
    change = f"time.sleep(0.01), Path('{file}').touch() if rank == 1 else None"
    code, log, facts = run(tmp_path, prepare=change)
    assert code == 0, log
    assert [fact["is_spare"] for fact in facts] == [False] * 4


def test_without_spare_ranks_every_rank_is_a_new_process(tmp_path: Path) -> None:
    prepare = "assert 'NEOX_IMPORTS_FILE' not in os.environ"
    code, log, _ = run(tmp_path, "--set", "spare_ranks=false", prepare=prepare, spares=0)
    assert code == 0, log
    assert len(importers(tmp_path)) == 4 and "restart 1 of 2" in log


def test_a_machine_that_starts_no_more_processes_goes_on_without_spares(monkeypatch: Any, capsys: Any) -> None:
    def fail(*words: Any, **options: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("megatron.launch.spares.start_rank", fail)
    process: Any = SimpleNamespace(pid=0)
    spares, rank = SpareRanks(), Rank(0, 1, process, 0, None)  # type: ignore[arg-type]
    (path,) = spares.begin_start().values()
    Path(path).write_text("{}")
    for _ in range(3):
        spares.renew(("python", "-u", "script.py"), [{"RANK": "0"}], [rank])
    spares.close()
    assert capsys.readouterr().err.count("Resource temporarily unavailable") == 1 and not Path(path).exists()
