"""Steps of an engine on random micro-batches, shared out over data ranks, and how they compare with those of
one process."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch

from megatron.data import Batch
from megatron.model import layer_params
from megatron.mpu import unshard
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Engine
from tests.model.stages import Weights, document_batch, random_batch


class Run(NamedTuple):
    """What one rank saw. weights: its parts after the steps, master values."""

    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, float]]
    tensor_rank: int
    weights: Weights


def batches_of(args: NeoXArgs, step: int, data_rank: int, packed: bool) -> list[Batch]:
    count = args.gradient_accumulation_steps or 1
    make = document_batch if packed else random_batch
    return [make(args, seed=100 * step + data_rank * count + i) for i in range(count)]


def train(engine: Engine, steps: Iterable[int], rate: float, packed: bool = False) -> Run:
    losses, norms, metrics = [], [], []
    for step in steps:
        batches = batches_of(engine.args, step, engine.groups.rank("data"), packed)
        result = engine.train_step(batches, rate)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm if result.grad_norm is not None else "nan"))
        metrics.append({name: float(value) for name, value in result.metrics.items()})
    return Run(losses, norms, metrics, engine.groups.rank("tensor"), engine.weights(master=True))


def whole(args: NeoXArgs, runs: list[Run]) -> Weights:
    """The whole parameters of all ranks."""
    return {
        layer: {
            spec.name: unshard(
                [held[layer][spec.name] for _, held in sorted(
                    {run.tensor_rank: run.weights for run in runs
                     if spec.name in run.weights.get(layer, {})}.items())], spec)
            for spec in specs
        }
        for layer, specs in layer_params(args).items()
    }  # fmt: skip


def assert_same(
    args: NeoXArgs, ours: list[Run], reference: Run, label: object, bound: float = 1e-5, of_weights: float = 2e-5
) -> None:
    """bound: of losses and norms, relative; of_weights: absolute."""
    for run in ours:
        assert run.losses == pytest.approx(reference.losses, rel=bound), label
        assert run.norms == pytest.approx(reference.norms, rel=bound), label
        for now, then in zip(run.metrics, reference.metrics, strict=True):
            assert now == pytest.approx(then, rel=1e-4, abs=1e-6), label
    expected = whole(args, [reference])
    for layer, tensors in whole(args, ours).items():
        for name, value in tensors.items():
            assert torch.allclose(value, expected[layer][name], atol=of_weights), (label, layer, name)
