"""The installed DeepSpeed computes right gradients, by SGD without clipping; known wrong ones are refused."""

import copy
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from megatron.training.deepspeed.attach import attach_deepspeed
from megatron.training.deepspeed.private_names import PRIVATE_NAMES, check_deepspeed, check_version, is_present
from tests.pool import run_ranks


@pytest.mark.parametrize(("version", "reason"), [
    ("0.14.5", "older"), ("0.16.0", "sum over micro-batches"), ("0.18.2", "sum over micro-batches"),
    ("0.18.9", "unreduced"), ("0.19.2", "divides its gradients again"),
])  # fmt: skip
def test_wrong_versions_are_refused(version: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=rf"deepspeed {version} .*{reason}.*deepspeed==0.19.8"):
        check_version(version)


def test_right_versions_pass_and_have_what_is_relied_on() -> None:
    check_deepspeed()
    check_version("0.19.3")
    check_version("0.20.0+cu130")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeepSpeedEngine, "_take_model_step")
    with pytest.raises(RuntimeError, match=r"deepspeed.runtime.engine.DeepSpeedEngine._take_model_step.* grad"):
        check_deepspeed()
    assert not is_present(PRIVATE_NAMES[0]._replace(name="_grads_of_old"))
    assert not is_present(PRIVATE_NAMES[0]._replace(location="deepspeed.gone:Engine"))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output.float() - target.float()) ** 2).mean()


def errors(rank: int, world_size: int, cases: list[tuple[int, int, bool, int]]) -> list[float]:
    """For the pool: of each case `error`; after a pipeline DeepSpeed takes nothing but pipelines."""
    attach_deepspeed()
    return [error(rank, world_size, *case) for case in cases]


def error(rank: int, world_size: int, pipe: int, stage: int, bf16: bool, micro_batches: int) -> float:
    """The largest relative error of this rank's updates against plain autograd, after a step of SGD."""
    torch.manual_seed(0)
    data_ranks, layers = world_size // pipe, [nn.Linear(8, 8, bias=False) for _ in range(2)]
    for layer in layers:
        layer.weight.data = layer.weight.data.bfloat16().float()
    reference = nn.Sequential(*copy.deepcopy(layers))
    data = [[tuple(torch.randn(2, 2, 8)) for _ in range(micro_batches)] for _ in range(data_ranks)]
    for part in data:
        for x, y in part:
            (loss_fn(reference(x), y) / (micro_batches * data_ranks)).backward()
    config: dict[str, Any] = {
        "train_batch_size": micro_batches * 2 * data_ranks, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
        "data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True, "steps_per_print": None,
        "bf16": {"enabled": bf16},
    }  # fmt: skip
    model: nn.Module = nn.Sequential(*layers)
    if pipe > 1:
        topology = PipeDataParallelTopology(pipe, data_ranks)
        model = PipelineModule(layers, topology=topology, loss_fn=loss_fn, partition_method="uniform")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    params = list(engine.module.parameters())
    read = (lambda p: safe_get_full_fp32_param(p).clone()) if stage else (lambda p: p.detach().clone())
    old_weights = [read(p) for p in params]
    dtype = torch.bfloat16 if bf16 else torch.float32
    data_rank = rank if pipe == 1 else engine.grid.get_data_parallel_rank()
    local_batches = [(x.to(dtype), y) for x, y in data[data_rank]]
    if pipe > 1:
        engine.train_batch(iter(local_batches))
        expected = [list(reference.parameters())[engine.stage_id]]
    else:
        for x, y in local_batches:
            engine.backward(loss_fn(engine(x), y))
            engine.step()
        expected = list(reference.parameters())
    updates = [old - read(p) for old, p in zip(old_weights, params, strict=True)]
    gradients: list[Any] = [param.grad for param in expected]
    return max(float((u - grad).norm() / grad.norm()) for u, grad in zip(updates, gradients, strict=True))


@pytest.mark.parametrize(("ranks", "layouts"), [
    (2, [(2, 0, False), (2, 1, False)]), (2, [(1, 1, True), (1, 2, True), (1, 3, False)]), (4, [(2, 1, True)]),
])  # fmt: skip
def test_gradients_of_the_installed_version(ranks: int, layouts: list[tuple[int, int, bool]]) -> None:
    cases = [(*layout, micro_batches) for layout in layouts for micro_batches in (1, 8)]
    for case, *rank_errors in zip(cases, *run_ranks(errors, ranks, cases), strict=True):
        assert max(rank_errors) < (2e-2 if case[2] else 1e-5), case
