"""One process on fake CUDA for all tests of a worker."""

from collections.abc import Iterator

import pytest

from megatron.planning.fake_cuda.shim import build, lacking
from tests.fake.client import FakeCuda


@pytest.fixture(scope="session")
def fake_cuda() -> Iterator[FakeCuda]:
    if (reason := lacking()) is not None:
        pytest.skip(f"left out: {reason}")
    process = FakeCuda(build())
    yield process
    process.close()
