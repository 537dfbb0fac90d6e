"""tools/jobs.py as it is typed, on a machine without Slurm; tests/slurm has it on one with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.training.runs import ADAMW, LLAMA, config
from tools import jobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, a PATH without Slurm, no site."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("NEOX_SITE", raising=False)


def write_run(folder: str, **status: object) -> None:
    save = Path(folder)
    save.mkdir(parents=True)
    (save / "status.json").write_text(json.dumps({"train_iters": 10, "host": "elsewhere", **status}))


def test_codes_and_streams(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main(["list"]) == 0
    streams = capsys.readouterr()
    assert not streams.out and streams.err.startswith("jobs.py: no jobs; ") and streams.err.count("\n") == 1
    assert jobs.main(["list", "--json"]) == 0 and json.loads(capsys.readouterr().out) == []
    write_run("checkpoints/good", status="finished")
    assert jobs.main(["list"]) == 0 and "FINISHED" in capsys.readouterr().out
    write_run("checkpoints/exp/bad", status="failed", reason="step 3: loss is not finite")
    assert jobs.main(["list", "--json"]) == 3
    rows = {row["id"]: row["verdict"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {"checkpoints/good": "FINISHED", "checkpoints/exp/bad": "CRASHED"}
    assert jobs.main(["list", "--name", "go*"]) == 0 and "bad" not in capsys.readouterr().out
    assert jobs.main(["list", "checkpoints/exp/bad"]) == 3
    assert "    step 3: loss is not finite" in capsys.readouterr().out.splitlines()[-1].rstrip()


@pytest.mark.parametrize(("words", "message"), [
    (["list", "4711"], "4711: no such folder, and this machine has no Slurm"),
    (["list", "47l1"], "47l1: neither"),
    (["list", "--user", "nobody-of-this-name"], "--user nobody-of-this-name: no such user on this machine"),
    (["logs", "checkpoints/a"], "checkpoints/a: neither"),
    (["cancel", "checkpoints/good"], "checkpoints/good: cannot be stopped from here: it has ended (finished)"),
    (["submit", "absent.yml"], "absent.yml: no such file"),
])  # fmt: skip
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run("checkpoints/good", status="finished")
    assert jobs.main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"jobs.py: error: {message}")


@pytest.mark.parametrize(("name", "message"), [
    ("gone.out", "7: there is no log gone.out (PENDING)"),
    (None, "7: there is no log (PENDING)"),
])  # fmt: skip
def test_a_job_without_a_log(name: str | None, message: str, monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    row = SimpleNamespace(job=SimpleNamespace(id="7", log=Path(name) if name else None), verdict="PENDING")
    monkeypatch.setattr(jobs, "overview", lambda choice, slurm, site: [row])
    assert jobs.main(["logs", "7"]) == 1
    assert capsys.readouterr().err == f"jobs.py: error: {message}\n"


@pytest.mark.parametrize(("words", "message"), [
    (["list", "--since", "7x"], "'7x' is not a time; write it like 90m, 12h or 7d"),
    (["watch", "--interval", "0"], "'0': expected seconds, more than 0"),
    (["submit", "a.yml", "--nodes", "0"], "'0': expected a whole number of 1 or more"),
    (["list", "--", "--time=1"], "only submit accepts sbatch options after --; remove them"),
])  # fmt: skip
def test_a_wrong_command_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        jobs.main(words)
    assert exit_info.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_it_starts_without_torch() -> None:
    code = "import sys; from tools.jobs import main; main(['list']); print({'torch', 'rich'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.product
def test_a_run_is_started_here_and_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, save = tmp_path / "a.yml", tmp_path / "checkpoints" / "a"
    path.write_text(yaml.safe_dump(config(LLAMA, ADAMW, save=str(save), checkpoint_factor=1000, train_iters=60)))
    assert jobs.main(["submit", str(path), "--local", "--watch", "20", "--interval", "0.2"]) == 0
    streams = capsys.readouterr()
    match = re.fullmatch(r"\d+: success: iteration (\d+)/60: loss .* tokens/s, share of peak unknown.*\n", streams.out)
    assert match and int(match[1]) >= 20, streams
    assert jobs.main(["logs", "checkpoints/a", "-f"]) == 0
    assert "run finished at iteration 60" in capsys.readouterr().out
    assert jobs.main(["list"]) == 0 and "60/60 (100%)" in capsys.readouterr().out
    path.write_text(path.read_text().replace("corpusA", "absent"))
    assert jobs.main(["submit", str(path), "--local", "--interval", "0.2", "--set", "restart=true"]) == 4
    streams = capsys.readouterr()
    assert not streams.out and ": data: " in streams.err
