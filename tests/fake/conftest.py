"""One process on fake CUDA for all tests of a worker."""

from collections.abc import Iterator

import pytest

from tests.fake.client import FakeCuda
from tests.fake.shim import build, lacking


@pytest.fixture(scope="session")
def fake_cuda() -> Iterator[FakeCuda]:
    if (reason := lacking()) is not None:
        pytest.skip(f"left out: {reason}")
    process = FakeCuda(build())
    yield process
    process.close()
