"""tools/jobs.py as it is typed, on a machine without Slurm; tests/slurm has it on one with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("jobs.py: no jobs; ") and said.err.count("\n") == 1
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


@pytest.mark.parametrize(("words", "says"), [
    (["list", "4711"], "4711: this machine has no Slurm (scontrol), nor is there such a folder"),
    (["list", "47l1"], "47l1: neither the number of a job nor the folder of a run (`save`)"),
    (["list", "--user", "nobody-of-this-name"], "--user nobody-of-this-name: this machine knows no such user"),
    (["logs", "checkpoints/a"], "checkpoints/a: neither the number of a job nor the folder of a run (`save`)"),
    (["cancel", "checkpoints/good"], "checkpoints/good: cannot be stopped from here: it has ended (finished)"),
    (["submit", "absent.yml"], "absent.yml: no such file"),
])  # fmt: skip
def test_bad_input_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run("checkpoints/good", status="finished")
    assert jobs.main(words) == 1
    assert capsys.readouterr().err == f"jobs.py: error: {says}\n"


@pytest.mark.parametrize(("words", "says"), [
    (["list", "--since", "7x"], "'7x' is no time; write 90m, 12h or 7d"),
    (["watch", "--interval", "0"], "'0': seconds, more than 0"),
    (["submit", "a.yml", "--nodes", "0"], "'0': a whole number from 1 on"),
    (["list", "--", "--time=1"], "only submit passes on what stands behind --"),
])  # fmt: skip
def test_a_wrong_command_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        jobs.main(words)
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(says)


def test_it_starts_without_torch() -> None:
    code = "import sys; from tools.jobs import main; main(['list']); print({'torch', 'rich'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.more
def test_a_run_is_started_here_and_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, save = tmp_path / "a.yml", tmp_path / "checkpoints" / "a"
    path.write_text(yaml.safe_dump(config(LLAMA, ADAMW, save=str(save), checkpoint_factor=1000, train_iters=60)))
    assert jobs.main(["submit", str(path), "--local", "--watch", "20", "--interval", "0.2"]) == 0
    said = capsys.readouterr()
    found = re.fullmatch(r"\d+: success: iteration (\d+)/60: loss .* tokens/s, share of peak unknown.*\n", said.out)
    assert found and int(found[1]) >= 20, said
    assert jobs.main(["logs", "checkpoints/a", "-f"]) == 0
    assert "run finished at iteration 60" in capsys.readouterr().out
    assert jobs.main(["list"]) == 0 and "60/60 (100%)" in capsys.readouterr().out
    path.write_text(path.read_text().replace("corpusA", "absent"))
    assert jobs.main(["submit", str(path), "--local", "--interval", "0.2", "--set", "restart=true"]) == 4
    said = capsys.readouterr()
    assert not said.out and ": data: " in said.err
