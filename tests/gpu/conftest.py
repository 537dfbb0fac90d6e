"""The device of the tests and its group: the first GPU and NCCL; in a rehearsal the CPU and gloo."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> "torch.device":
    import torch

    rehearsed = request.config.getoption("rehearse", False)
    return torch.device("cpu") if rehearsed else torch.device("cuda", 0)


@pytest.fixture(scope="session", autouse=True)
def process_group(device: "torch.device") -> Iterator[None]:
    import torch.distributed as dist

    from tests.gpu.runs import join

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS begins
    join(device)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def only_gpu(request: pytest.FixtureRequest, device: "torch.device") -> None:
    """The mark `only_gpu("reason")` leaves a test out of a rehearsal."""
    mark = request.node.get_closest_marker("only_gpu")
    if mark is not None and device.type != "cuda":
        pytest.skip(f"only on a GPU: {mark.args[0]}")
