"""One process with fake CUDA for all tests of a worker: it takes seconds to start."""

from collections.abc import Iterator

import pytest

from megatron.planning.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes(1) as started:
        yield started
