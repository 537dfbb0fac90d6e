"""The page of claims: it has every claim, and its plans are those of today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planned_claims import CLAIMS
from megatron.planning.fake_cuda import shim

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/planned-claims.md"
needs_compiler = pytest.mark.skipif(shim.lacking() is not None, reason=f"left out: {shim.lacking()}")


def rows_of(page: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


def test_the_page_has_all_claims() -> None:
    rows = rows_of(PAGE.read_text())
    assert list(rows) == [claim.name for claim in CLAIMS]
    for claim in CLAIMS:
        gpus, claimed = rows[claim.name][:2]
        assert gpus.startswith(f"{claim.gpus} {claim.gpu}") and claimed.startswith(f"{claim.claimed[0]:,.0f}")


@pytest.mark.product
@needs_compiler
def test_its_plans_are_those_of_today() -> None:
    command = [sys.executable, "benchmarks/planned_claims.py"]
    page = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    written, planned = rows_of(PAGE.read_text()), rows_of(page)
    assert written.keys() == planned.keys()
    for name, cells in planned.items():
        numbers = [
            [float(x.replace(",", "")) for x in re.findall(r"[\d,.]*\d", " ".join(row))]
            for row in (cells, written[name])
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02), name
