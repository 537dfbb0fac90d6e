"""Master weights and optimizer states in host memory: the bits of the same run with them on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.metrics.metric_probes import sum_of_squares
from megatron.training.native.engine import NativeEngine
from megatron.training.native.fully_sharded import ShardedWeights
from megatron.training.native.update_keys import resolve_update_keys
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.layout_runs import zero
from tests.training.native.in_turn import TIMEOUT, assert_resumes, interrupted_runs, to_their_ends
from tests.training.runs import (
    ADAMW,
    LLAMA,
    NEOX,
    RPE,
    SGD,
    SP2,
    assert_alike,
    begin,
    bit_equal,
    cells,
    config,
    curves_of,
)  # fmt: skip
from tests.training.test_mamba import MODELS as MAMBA

STEPS = 4
CPU = {"offload_optimizer": {"device": "cpu"}}
ON_HOST = {"zero_optimization": {"stage": 1, **CPU}}
MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
LION: dict[str, Any] = {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}
MIXTURE = {**LLAMA, "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "expert_parallel_size": 2}
BF16, FP16 = {"precision": "bfloat16"}, {"precision": "fp16", "fp16": {"initial_scale_power": 12}}
ADAPTERS = {"lora": {"r": 4, "alpha": 8}}
PP2 = {"pipe_parallel_size": 2}
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, ZeRO stage, keys
    "dp2 zero1, accumulated": (2, 1, {**NEOX, **ADAMW, "train_micro_batch_size_per_gpu": 2}),
    "dp2 zero2 tied pp2, rpe": (4, 2, {**RPE, **ADAMW, **PP2, "no_weight_tying": False}),
    "dp2 zero3 bf16 mixture": (2, 3, {**MIXTURE, **ADAMW, **BF16}),
    "dp2 zero2 bf16, Muon": (2, 2, {**LLAMA, **MUON, **BF16}),
    "dp2 zero1 bf16, Mamba 2": (2, 1, {**MAMBA["mamba2"], **ADAMW, **BF16}),
    "dp2 zero1 fp16, Lion": (2, 1, {**NEOX, **LION, **FP16}),
    "dp2 zero3, bf16 moments": (2, 3, {**LLAMA, **ADAMW, "optimizer_state_dtype": "bf16"}),
    "dp2 zero2, adapters": (2, 2, {**LLAMA, **ADAMW, **ADAPTERS}),
    "tp2 sp dp2 zero3, SGD": (4, 3, {**NEOX, **SGD, **SP2}),
    "dp2 zero1 interleaved pp2": (4, 1, {**LLAMA, **ADAMW, **PP2, "pipeline_schedule": "interleaved"}),
    "dp2 zero1 zbv pp2": (4, 1, {**LLAMA, **ADAMW, **PP2, "pipeline_schedule": "zbv"}),
    "dp4 zero3 by twos": (4, 3, {**LLAMA, **ADAMW, "neighbours": 2}),
}  # fmt: skip
DEFAULT_RUNS = ["dp2 zero1 bf16, Mamba 2"]
MORE_RUNS = ["dp2 zero3 bf16 mixture"]


def run_config(name: str, offloaded: bool) -> dict[str, Any]:
    _, stage, keys = RUNS[name]
    neighbours = {"zero_hpz_partition_size": keys["neighbours"]} if "neighbours" in keys else {}
    section = {"stage": stage, **neighbours, **(CPU if offloaded else {})}
    keys = {key: value for key, value in keys.items() if key != "neighbours"}
    return config({"train_micro_batch_size_per_gpu": 1}, keys, zero_optimization=section, engine="native")


@pytest.mark.parametrize(
    "name", cells(DEFAULT_RUNS, MORE_RUNS, [name for name in RUNS if name not in DEFAULT_RUNS + MORE_RUNS])
)
def test_the_bits_of_state_on_the_device(name: str) -> None:
    pair = {offloaded: run_config(name, offloaded) for offloaded in (False, True)}
    on_device, on_host = (curves_of({0: pair[o]}, STEPS, RUNS[name][0])[0] for o in (False, True))
    assert on_host.losses == on_device.losses and on_host.norms == on_device.norms
    assert bit_equal(on_host.weights, on_device.weights)


@pytest.mark.parametrize(("stage", "layout"), cells([(3, {})], product=[(1, {}), (2, SP2), (1, PP2)]))
def test_offload_on_one_data_rank(stage: int, layout: dict[str, Any]) -> None:
    """The host adds up the gradients of micro-batches."""
    keys = {"train_micro_batch_size_per_gpu": 2, "engine": "native", **layout}
    sections = {"host": {"stage": stage, **CPU}, "device": {"stage": stage}}
    runs = {name: config(LLAMA, ADAMW, keys, zero_optimization=section) for name, section in sections.items()}
    run_curves = curves_of(runs, STEPS, 2 if layout else 1)
    assert_alike({0: run_curves["host"]}, {0: run_curves["device"]})


def norms_of(rank: int, world_size: int, values: dict[str, Any], gradient: Tensor) -> list[float]:
    """For the pool: the norm that the engine computes of a model's gradient, and that of its metrics."""
    training = begin(values)
    engine = training.engine
    assert isinstance(engine, NativeEngine)
    assert isinstance(engine.shards, ShardedWeights), "its states are offloaded, on one rank too"
    missing = [None] * (len(engine.shards.trained) - 1)
    squares = sum_of_squares([gradient], training.groups.device)
    return [float(engine._update.judge([gradient, *missing])), float(squares.sqrt())]


def test_the_norm_of_a_large_gradient_on_the_host() -> None:
    """torch's fp32 norm on CPUs is 0.4 % too small here."""
    gradient = torch.randn(50_000_000, generator=torch.Generator().manual_seed(1))
    values = config(LLAMA, ADAMW, {"train_micro_batch_size_per_gpu": 8}, ON_HOST, engine="native")
    [norms] = run_ranks(norms_of, 1, values, gradient)
    assert norms == pytest.approx([float(gradient.double().norm())] * 2, rel=1e-6)


# Out of memory at step 2: offload on, or off again, under the same engine or the other one.
TORCH_ADAM = {"engine": "deepspeed", "optimizer": {**ADAMW["optimizer"], "type": "CPU_Torch_Adam"}}
CHANGES = {
    "on": ({**zero(1)}, ON_HOST),
    "off": (ON_HOST, {"zero_optimization": {"stage": 3}}),
    "from DeepSpeed": ({**ON_HOST, **TORCH_ADAM}, {**ON_HOST, "engine": "native"}),
    "to DeepSpeed": (ON_HOST, {**ON_HOST, **TORCH_ADAM}),
}


@pytest.mark.parametrize("name", cells([], ["on"], list(CHANGES)[1:]))
def test_offload_can_change_on_resume(name: str, tmp_path: Path) -> None:
    """A lost optimizer state is 1e-4 away, and rounding 1e-6."""
    first_keys, resumed_keys = CHANGES[name]
    common = config(LLAMA, ADAMW, {"train_micro_batch_size_per_gpu": 2, "train_iters": STEPS, "engine": "native"})
    runs = interrupted_runs({**common, **first_keys}, tmp_path)
    runs[2] = {**common, **resumed_keys, **{key: runs[2][key] for key in ("load", "save", "checkpoint_factor")}}
    run_ranks(to_their_ends, 2, runs, timeout=TIMEOUT)
    assert len(losses(tmp_path / "cut")) == STEPS
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "through"), rel=1e-6)


@pytest.mark.parametrize(
    "name", cells([], ["dp2 zero3 bf16 mixture"], ["dp2 zero2 bf16, Muon", "dp2 zero1 fp16, Lion"])
)
def test_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    ranks = RUNS[name][0]
    assert_resumes({**run_config(name, True), "train_iters": STEPS, "lr_decay_style": "cosine"}, tmp_path, ranks)


@pytest.mark.parametrize(("section", "facts"), [
    ({"stage": 0, **CPU}, "offload_optimizer.*stage 1.*not 0"),
    ({"stage": 3, **CPU, "offload_param": {"device": "cpu"}}, None),
    ({"stage": 2, **CPU, "offload_param": {"device": "cpu"}}, "offload_param.*stage 3.*not 2"),
    ({"stage": 3, "offload_param": {"device": "cpu"}}, "offload_param.*offload_optimizer.*engine: deepspeed"),
    ({"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio.*0.5"),
], ids=str)  # fmt: skip
def test_what_cannot_be_offloaded(section: dict[str, Any], facts: str | None) -> None:
    args = NeoXArgs.from_dict(config(NEOX, zero_optimization=section, engine="native")).for_world(2)
    if facts is None:
        NativeEngine.check(args)
        return
    with pytest.raises(ConfigError, match=facts):
        NativeEngine.check(args)


@pytest.mark.parametrize("key", ["fused_update", "overlap_optimizer_with_forward"])
def test_updates_of_the_device_are_refused(key: str) -> None:
    values = config(NEOX, ON_HOST, BF16, {key: True, "engine": "native", "train_micro_batch_size_per_gpu": 8})
    args = NeoXArgs.from_dict(values).for_world(1)
    with pytest.raises(ConfigError, match=f"{key}.*offload_optimizer"):
        resolve_update_keys(args, ParallelGroups.single(), "native", print)
    chosen = resolve_update_keys(args.settle(key, "auto"), ParallelGroups.single(), "native", print)
    assert getattr(chosen, key) is False
