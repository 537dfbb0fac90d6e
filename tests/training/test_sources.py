"""The training loss of each source (`log_loss_by_source`)."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron.data.loader import rank_slice
from megatron.training.loop import steps_of
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, LLAMA, TABLE, begin, cells, config, curves

A, B = (str(GOLDEN / "dataset" / f"corpus{name}_text_document") for name in "AB")
BLEND: dict[str, Any] = {
    "data_path": None, "train_data_paths": [A, B], "train_data_weights": [3.0, 1.0], "eval_iters": 0,
    "train_micro_batch_size_per_gpu": 2,
}  # fmt: skip


def first_step(rank: int, world_size: int, values: dict[str, Any]) -> tuple[dict[str, float], float, Tensor]:
    """For the pool: metrics and loss of a first step, and by hand the loss and the tokens of each source."""
    training = begin(values)
    args, train = training.args, cast(Any, training.datasets.train)
    batches, sums = next(steps_of(training)).batches, torch.zeros(2, 2)
    micro = args.train_batch_size // len(batches)
    for i, (batch, logprobs) in enumerate(zip(batches, training.engine.token_logprobs(batches), strict=True)):
        samples = rank_slice(i * micro, micro, training.groups.rank("data"), training.groups.size("data"))
        for sample, row, weights in zip(samples, logprobs.cpu(), batch.loss_weights, strict=True):
            sums[train.maps.dataset_index[sample]] += torch.stack([-(row * weights).sum(), weights.sum()])
    result = training.engine.train_step(batches, 1e-3)
    return {name: float(value) for name, value in result.metrics.items()}, float(result.loss), sums


@pytest.mark.parametrize(
    "name", cells(["dp2"], ["plain", "pp2", "tp2", "cp2", "zero3, deepspeed", "pp2, deepspeed", "tp2 pp2 sp"])
)
def test_loss_of_each_source_is_that_of_its_rows(name: str) -> None:
    """The loss itself is the same to the last bit, and the sources' losses by their shares add up to it."""
    ranks, layout = (2, {"context_parallel_size": 2}) if name == "cp2" else TABLE[name]
    values = config(LLAMA, BLEND, layout, log_loss_by_source=True)
    outcomes = run_ranks(first_step, ranks, values)
    plain_loss = run_ranks(curves, ranks, [{**values, "log_loss_by_source": False}], 1)[0][0].losses[0]
    replicas = ranks if name in ("dp2", "zero3, deepspeed") else 1
    expected_sums = torch.stack([sums for _, _, sums in outcomes[:replicas]]).sum(0)
    for metrics, loss, _ in outcomes:
        losses, shares = (
            torch.tensor([metrics[f"{kind}_by_source/corpus{name}_text_document"] for name in "AB"])
            for kind in ("loss", "share")
        )
        assert loss == plain_loss
        assert torch.allclose(losses, expected_sums[:, 0] / expected_sums[:, 1], rtol=1e-5)
        assert torch.allclose(shares, expected_sums[:, 1] / expected_sums[:, 1].sum())
        assert float(losses @ shares) == pytest.approx(loss, rel=1e-6) and losses[0] != losses[1]
