"""Keys, flags, metrics, log lines and files that users rely on equal those of the golden files here.

`pytest tests/contracts --write-contracts -m "cpu or more"` writes the files again after an intended change.
Other tests pin bytes of .bin and .idx (tests/data), exit codes (tests/launch, operations, slurm), keys
of GPT-NeoX (tests/neox_arguments), trackers' rows beside metrics.jsonl (tests/training).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any, get_origin

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from tests.contracts.flags import ROOT
from tests.contracts.runs import run_contracts


def type_name(annotation: Any) -> str:
    if get_origin(annotation) is None:
        return getattr(annotation, "__name__", repr(annotation))
    return re.sub(r"\b[\w.]+\.(?=\w)", "", repr(annotation))


def key_lines(declaration: type, prefix: str = "") -> Iterator[str]:
    """A line for each configuration key, then those of its section: type and default."""
    for key in keys_of(declaration).values():
        kind = "section" if key.section else type_name(key.type)
        yield f"{prefix}{key.name}: {kind} = {key.default!r}"
        if key.section:
            yield from key_lines(key.section, f"{prefix}{key.name}.")


def flag_lines() -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.contracts.flags"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    return re.sub(r"'\d{4}-\d\d-\d\d'", "TODAY", output).splitlines()


def compare(name: str, sections: dict[str, list[str]], request: pytest.FixtureRequest) -> None:
    """Compares sections with a golden file, or writes the file where the option says so."""
    path = Path(__file__).with_name(name)
    text = "".join(f"# {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items())
    if request.config.getoption("--write-contracts", default=False):
        path.write_text(text, encoding="utf-8")
    golden = path.read_text(encoding="utf-8")
    changes = unified_diff(golden.splitlines(), text.splitlines(), name, "this tree", lineterm="", n=0)
    assert golden == text, "\n".join(changes)


def test_keys_and_flags_are_unchanged(request: pytest.FixtureRequest) -> None:
    sections = {"configuration keys": sorted(key_lines(NeoXArgs)), "flags of commands": flag_lines()}
    compare("keys_and_flags.txt", sections, request)


@pytest.mark.more
def test_metrics_log_lines_and_files_are_unchanged(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    compare("runs.txt", run_contracts(tmp_path), request)
