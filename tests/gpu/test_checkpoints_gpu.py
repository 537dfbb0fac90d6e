"""Checkpoints of a GPU: a resumed run is bit for bit the one that was not stopped, and a CPU reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training import train
from tests.gpu.runs import PRECISIONS, on_ranks, run
from tests.model.stages import random_batch
from tests.training.runs import ADAMW, NEOX, begin, bit_equal, config

pytestmark = pytest.mark.gpu
Weights = dict[int, dict[str, Tensor]]


@pytest.fixture
def repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def values_of(precision: str, save: Path) -> dict[str, Any]:
    return config(NEOX, ADAMW, PRECISIONS[precision], train_micro_batch_size_per_gpu=4, train_iters=6,
                  hidden_dropout=0.1, attention_backend="math", checkpoint_factor=100, save=str(save))  # fmt: skip


def weights_after(values: dict[str, Any]) -> tuple[int, Weights]:
    with run(values) as training:
        train(training)
        return training.progress.iteration, training.engine.weights(master=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_is_bit_equal(precision: str, tmp_path: Path, repeatable: None) -> None:
    uninterrupted = weights_after(values_of(precision, tmp_path / "through"))
    parts = values_of(precision, tmp_path / "parts")
    assert weights_after({**parts, "exit_interval": 3})[0] == 3
    resumed = weights_after(parts)
    assert uninterrupted[0] == resumed[0] == 6
    assert bit_equal(uninterrupted[1], resumed[1])


def reload(rank: int, world: int, values: dict[str, Any]) -> tuple[str, int, Weights, Tensor]:
    """On a rank: device, iteration, fp32 weights and log-probabilities of a run from its checkpoint."""
    training = begin(values)
    logprobs = training.engine.token_logprobs([random_batch(training.engine.args, rows=4)])[0]
    device = training.groups.device.type
    return device, training.progress.iteration, training.engine.weights(master=True), logprobs.cpu()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_reads_what_was_written_there(precision: str, tmp_path: Path, device: torch.device) -> None:
    values = values_of(precision, tmp_path / "run")
    with run(values) as training:
        train(training)
        weights = training.engine.weights(master=True)
        logprobs = training.engine.token_logprobs([random_batch(training.engine.args, rows=4)])[0].cpu()
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    on_cpu = on_ranks(reload, 1, {**values, "distributed_backend": "gloo"}, env=hidden)[0]
    assert on_cpu[:2] == ("cpu", 6)
    assert bit_equal(on_cpu[2], weights), "the checkpoint holds the same bits"
    # Log-probabilities near -6; bf16 rounds logits of size one to 2^-8 of themselves.
    torch.testing.assert_close(on_cpu[3], logprobs, rtol=0, atol={"fp32": 1e-4, "bf16": 0.1}[precision])
