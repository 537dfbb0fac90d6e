"""One NCCL process group for all tests here, and arithmetic that repeats bit for bit where a test asks for
it."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    from tests.gpu.runs import join_gpu

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS begins
    join_gpu()
    yield
    dist.destroy_process_group()
