"""One process on fake CUDA for all tests of a worker."""

from collections.abc import Iterator

import pytest

from tests.fake.client import FakeCuda
from tests.fake.shim import build, compiler


@pytest.fixture(scope="session")
def fake_cuda() -> Iterator[FakeCuda]:
    compile_with = compiler()
    if compile_with is None:
        pytest.skip("left out: fake CUDA needs a C++ compiler")
    process = FakeCuda(build(compile_with))
    yield process
    process.close()
