"""A slice of the fault campaign: whatever breaks a run, it goes on to the same bits or says what is wrong."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults import read_ledger

ROOT = Path(__file__).resolve().parents[2]


def run_campaign(folder: Path, seed: int, cases: int, *words: str) -> Counter[str]:
    """Returns the number of cases of each verdict. The numbers of a wrong case are in the error."""
    ledger = folder / "ledger.jsonl"
    command = ["benchmarks/faults.py", "--seed", str(seed), "--n", str(cases), "--ledger", str(ledger), *words]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    rows = read_ledger(ledger)
    assert len(rows) == cases, done.stdout + done.stderr
    wrong = [row for row in rows if row["verdict"] == "wrong"]
    assert (done.returncode, wrong) == (0, []), f"seed {seed}"
    return Counter(row["verdict"] for row in rows)


@pytest.mark.parametrize(("layout", "objective"), [("dp2", "pretraining"), ("tp2", "dpo"), ("zero1", "sft")])
def test_twenty_faults(layout: str, objective: str, tmp_path: Path) -> None:
    verdicts = run_campaign(tmp_path, 0, 20, "--layouts", layout, "--objectives", objective)
    assert verdicts["equal"] + verdicts["refused"] >= 15 and verdicts["refused"] >= 1, "most faults have happened"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_hundreds_of_faults(tmp_path: Path) -> None:
    assert run_campaign(tmp_path, random.randrange(1000, 10**6), 500)["equal"] > 200
