"""AdamW steps on random micro-batches, shared out over data ranks, beside those of one process."""

from typing import Any, NamedTuple

import pytest
import torch

from megatron.data import Batch
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Engine
from megatron.training.setup import build_engine
from tests.model.runs import full_weights
from tests.model.stages import Weights, document_batch, groups_of, random_batch, small

STEPS, RATE, MICRO_BATCHES = 4, 1e-3, 4
UNPACKED, PACKED = False, True


class Run(NamedTuple):
    """The results of one rank. weights: its parts after the steps, master values."""

    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, float]]
    tensor_rank: int
    weights: Weights


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def args_of(model: dict[str, Any], layout: dict[str, Any], world_size: int) -> NeoXArgs:
    data = world_size // layout.get("model_parallel_size", 1) // layout.get("pipe_parallel_size", 1)
    return small(
        **{"optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-6}},
           "gradient_clipping": 0.5, "train_iters": STEPS, "train_micro_batch_size_per_gpu": 2,
           "gradient_accumulation_steps": MICRO_BATCHES // data, **model, **layout}
    ).for_world(world_size)  # fmt: skip


def some_steps(rank: int, world_size: int, models: list[tuple[Any, bool]], layout: dict[str, Any]) -> list[Run]:
    """For the pool: of models, each on packed rows or not."""
    rank_runs = []
    for model, packed in models:
        args = args_of(model, layout, world_size)
        engine = build_engine(args, groups_of(args, world_size))
        rank_runs.append(train(engine, range(STEPS), RATE, packed))
        engine.close()
    return rank_runs


def train(
    engine: Engine, steps: range, rate: float, packed: bool = False, step_batches: list[Batch] | None = None
) -> Run:
    """step_batches: the batches of every step; else random ones."""
    losses, norms, metrics = [], [], []
    make, count = document_batch if packed else random_batch, engine.args.gradient_accumulation_steps or 1
    for step in steps:
        first_seed = 100 * step + count * engine.groups.rank("data")
        batches = step_batches or [make(engine.args, seed=seed) for seed in range(first_seed, first_seed + count)]
        result = engine.train_step(batches, rate)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm if result.grad_norm is not None else "nan"))
        metrics.append({name: float(value) for name, value in result.metrics.items()})
    return Run(losses, norms, metrics, engine.groups.rank("tensor"), engine.weights(master=True))


def assert_same(
    args: NeoXArgs,
    rank_runs: list[Run],
    reference: Run,
    label: object,
    bound: float = 1e-5,
    weights_bound: float = 2e-5,
) -> None:
    """bound: of losses and norms, relative; weights_bound: absolute."""
    for run in rank_runs:
        assert run.losses == pytest.approx(reference.losses, rel=bound), label
        assert run.norms == pytest.approx(reference.norms, rel=bound), label
        for now, expected_metrics in zip(run.metrics, reference.metrics, strict=True):
            assert now == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6), label
    weights, expected = full_weights(args, rank_runs), full_weights(args, [reference])
    torch.testing.assert_close(
        weights, expected, rtol=1e-5, atol=weights_bound, msg=lambda message: f"{label}: {message}"
    )
