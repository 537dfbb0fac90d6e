"""Copies for checkpoints from a GPU: page-locked for CUDA, their bytes, a limit without an error."""

from pathlib import Path

import pytest
import torch

from megatron.training import train
from megatron.training.checkpoint import host_copies as module
from megatron.training.checkpoint.host_copies import HostCopies, host_copies
from tests.gpu.runs import CPU, no_waiting, run
from tests.training.checkpoint.test_host_copies import saved, sums, tensors
from tests.training.runs import ADAMW, NEOX, config

pytestmark = [pytest.mark.gpu, pytest.mark.only_gpu("memory is page-locked for CUDA")]
GPU = torch.device("cuda", 0)


def test_copies_are_those_of_the_cpu() -> None:
    """Also while the device is busy: nothing is written over before it was read."""
    copies, ordinary, held = host_copies(GPU), host_copies(CPU), []
    for _ in range(3):
        sources = {name: tensor.detach().to(GPU) for name, tensor in tensors().items()}
        expected = {name: ordinary.copy(tensor) for name, tensor in sources.items()}
        torch.cuda._sleep(50_000_000)
        copied = {name: copies.copy(tensor) for name, tensor in sources.items()}
        for tensor in sources.values():
            tensor.zero_()
        copies.wait()
        assert all(host_copy.is_pinned() for host_copy in copied.values() if host_copy.numel())
        assert saved(copied) == saved(expected)
        held.append(copies.held)
    assert held[0] > 0 and held[1:] == [2 * held[0]] * 2, "the first round's are alive while the second is made"


def test_no_copy_waits_for_the_device() -> None:
    copies, source = host_copies(GPU), torch.randn(512, 512, device=GPU)
    warm = copies.copy(source.t())
    del warm
    with no_waiting():
        copied = copies.copy(source.t())
    copies.wait()
    assert torch.equal(copied, source.t().cpu())


def test_memory_that_cannot_be_locked_leaves_no_error() -> None:
    """Memory is refused that is locked already; kernels launched later do not hear of it."""
    real = module._cuda_page_locking(GPU)

    def lock_twice(address: int, size: int) -> None:
        real.lock(address, size)
        try:
            real.lock(address, size)
        finally:
            real.unlock(address)

    copies, source = (
        HostCopies(GPU, module.PageLocking(lock_twice, real.unlock, real.wait)),
        torch.ones(3000, device=GPU),
    )
    assert torch.equal(copies.copy(source), torch.ones(3000))
    assert copies.problem is not None and copies.held == 0
    assert float((source + 1).sum()) == 6000


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_saves_are_those_through_ordinary_memory(stage: int, tmp_path: Path) -> None:
    files = {}
    for kind in ("locked", "ordinary"):
        values = config(NEOX, ADAMW, precision="bfloat16", train_micro_batch_size_per_gpu=4, train_iters=3,
                        checkpoint_factor=1, attention_backend="math", zero_optimization={"stage": stage},
                        save=str(tmp_path / kind))  # fmt: skip
        torch.use_deterministic_algorithms(True)
        try:
            with run(values) as training:
                if kind == "ordinary":
                    training.checkpointer._copies = HostCopies(GPU, None)
                train(training)
                assert (training.checkpointer._copies.held > 0) == (kind == "locked")
                assert training.checkpointer._copies.problem is None
        finally:
            torch.use_deterministic_algorithms(False)
        files[kind] = sums(tmp_path / kind)
    assert len(files["locked"]) >= 3 * 8 and files["locked"] == files["ordinary"]
