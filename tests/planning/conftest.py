"""The command, and one process with fake CUDA for all tests of a worker: it takes seconds to start."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch import install_root
from megatron.planning.command import main
from megatron.planning.processes import Processes
from tests.fake.layouts import MODEL


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes(1) as started:
        yield started


@pytest.fixture
def plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command on `MODEL` and further keys; returns the exit code and both outputs."""

    monkeypatch.setattr("megatron.planning.command.Processes", lambda number: nullcontext(processes))

    def run(*flags: str, **keys: Any) -> tuple[int, str, str]:
        file = tmp_path / "model.yml"
        file.write_text(yaml.safe_dump({**MODEL, **keys}))
        code = main([str(file), *flags], install_root())
        return code, *capsys.readouterr()

    return run
