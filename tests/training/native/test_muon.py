"""Muon against torch.optim.Muon, in one process and in layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.model import build_stage
from megatron.mpu import ParallelGroups, mix_seed, shard
from megatron.neox_arguments import NeoXArgs
from megatron.training.native.engine import NativeEngine
from megatron.training.native.shards import ReplicatedWeights
from megatron.training.native.update import build_native_optimizer
from tests.pool import run_ranks
from tests.training.native.in_turn import TIMEOUT, assert_resumes
from tests.training.runs import LAYOUTS as TWO_RANK_LAYOUTS
from tests.training.runs import (
    LLAMA,
    NEOX,
    Part,
    assert_alike,
    begin_each,
    bit_equal,
    cells,
    config,
    curves,
    full_curve,
)

LR, ADAMW_LR, DECAY = 0.02, 3e-3, 0.1


def model_and_optimizer(model_keys: dict[str, Any], **params: Any) -> tuple[NeoXArgs, ReplicatedWeights, Any]:
    """A model of one process and its optimizer."""
    optimizer = {"type": "Muon", "params": {"lr": LR, **params}}
    args = NeoXArgs.from_dict(config(model_keys, optimizer=optimizer, padded_vocab_size=384)).for_world(1)
    groups = ParallelGroups.single()
    weights = ReplicatedWeights(build_stage(args, groups), args, groups, torch.float32)
    return args, weights, build_native_optimizer(weights, weights.trained, args, groups)


def projections(name: str, weight: Tensor, args: NeoXArgs, per_head: bool = False) -> list[Tensor]:
    """A fused weight's linear layers as HuggingFace has them: [q, k, v] a head, [Q | K | V], [up | gate].

    per_head: those of attention by head."""
    heads, head_dim = args.num_attention_heads, args.head_dim
    if per_head and name.endswith("latent_up.weight"):
        nope, value = args.qk_nope_head_dim, args.v_head_dim
        assert nope is not None and value is not None
        return [part for head in weight.chunk(heads) for part in head.split([nope, value])]
    if per_head and name.endswith(("query_key_value.weight", "attention.query.weight")):
        return list(weight.split(head_dim))
    if name.endswith("query_key_value.weight"):
        if args.num_kv_heads in (None, heads):
            return [weight.view(heads, 3, head_dim, -1)[:, i] for i in range(3)]
        return list(weight.split([heads * head_dim, 2 * head_dim, 2 * head_dim]))
    if name.endswith("linear1.weight") and args.activation == "swiglu":
        return list(weight.chunk(2))
    return [weight]


@pytest.mark.parametrize(("model", "adjust"), [(NEOX, "original"), (LLAMA, "match_rms_adamw"), (LLAMA, "original")])
def test_torchs_numbers(model: dict[str, Any], adjust: str) -> None:
    args, weights, engine_muon = model_and_optimizer(model, adjust_lr_fn=adjust, adamw_lr=ADAMW_LR, betas=[0.9, 0.95])
    for group in engine_muon.param_groups[1:]:
        group["lr"] = ADAMW_LR

    def parts(name: str, tensor: Tensor) -> list[Tensor]:
        return [p.reshape(-1, p.shape[-1]) if p.dim() > 1 else p for p in projections(name, tensor.detach(), args)]

    matrices, adamw_params = list[nn.Parameter](), list[nn.Parameter]()
    twins: list[tuple[Any, list[nn.Parameter]]] = []
    for held in weights.trained:
        twins.append((held, [nn.Parameter(part.clone()) for part in parts(held.name, held.local)]))
        in_block = 2 <= held.layer < 2 + args.num_layers
        (matrices if in_block and held.local.dim() == 2 else adamw_params).extend(twins[-1][1])
    muon = torch.optim.Muon(matrices, LR, DECAY, adjust_lr_fn=adjust)
    decays = [{"params": [p], "weight_decay": DECAY if p.dim() == 2 else 0.0} for p in adamw_params]
    adamw = torch.optim.AdamW(decays, ADAMW_LR, (0.9, 0.95), 1e-8)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for held, params in twins:
            held.local.grad = torch.randn(held.local.shape, generator=generator)
            for param, grad in zip(params, parts(held.name, held.local.grad), strict=True):
                param.grad = grad.clone()
        for optimizer in (engine_muon, muon, adamw):
            optimizer.step()
    for held, params in twins:
        for param, part in zip(params, parts(held.name, held.local), strict=True):
            torch.testing.assert_close(part, param.detach(), rtol=1e-6, atol=1e-7)
    assert len(matrices) == (7 if model is LLAMA else 6) * args.num_layers


LATENT = {**LLAMA, "num_kv_heads": None, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
          "v_head_dim": 8}  # fmt: skip


@pytest.mark.parametrize("model", [NEOX, LLAMA, LATENT], ids=["neox", "llama", "latent"])
def test_heads_alone_are_as_if_they_were_weights(model: dict[str, Any]) -> None:
    """The expected numbers are those of torch.optim.Muon; batched products round otherwise, in bf16."""
    args, weights, engine_muon = model_and_optimizer(model, per_head=True)
    twins: list[tuple[Any, list[nn.Parameter]]] = []
    for held in weights.trained:
        held.local.grad = torch.randn(held.local.shape, generator=torch.Generator().manual_seed(held.layer))
        if not held.name.startswith("attention.") or held.local.dim() != 2:
            continue
        params = [nn.Parameter(part.clone()) for part in projections(held.name, held.local.detach(), args, True)]
        for param, grad in zip(params, projections(held.name, held.local.grad, args, True), strict=True):
            param.grad = grad
        torch.optim.Muon(params, LR, DECAY, adjust_lr_fn="match_rms_adamw").step()
        twins.append((held, params))
    engine_muon.step()
    for held, params in twins:
        for part, param in zip(projections(held.name, held.local.detach(), args, True), params, strict=True):
            # The root of the mean square of an update. How bf16 iterations round depends on the CPU.
            update_size = LR * 0.2
            torch.testing.assert_close(part, param.detach(), rtol=0, atol=update_size * 2**-3)
    assert sum(len(params) for _, params in twins) > 2 * args.num_layers * args.num_attention_heads


def test_a_skipped_step_changes_nothing() -> None:
    _, weights, optimizer = model_and_optimizer(NEOX)
    optimizer.grad_scale = torch.tensor(2.0)
    for skip, value in ((0.0, 1.0), (1.0, float("nan"))):
        for held in weights.trained:
            held.local.grad = torch.full_like(held.local, value)
        old_weights = [held.local.detach().clone() for held in weights.trained]
        moments = [{k: v.clone() for k, v in optimizer.state[s.local].items()} for s in weights.trained]
        optimizer.found_inf = torch.tensor(skip)
        optimizer.step()
        assert {not torch.equal(s.local, b) for s, b in zip(weights.trained, old_weights, strict=True)} == {skip == 0.0}
    for held, state in zip(weights.trained, moments, strict=True):
        assert all(torch.equal(optimizer.state[held.local][key], value) for key, value in state.items())


MODELS = {"neox": NEOX, "llama": LLAMA}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: TWO_RANK_LAYOUTS[name] for name in ("dp2", "zero1", "zero3")},
    "tp2 sp": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "dp4 zero3 by twos": (4, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
    "dp2 x tp2 zero2": (4, {"model_parallel_size": 2, "zero_optimization": {"stage": 2}}),
}


def slow(model: str, layout: dict[str, Any]) -> dict[str, Any]:
    # keys' bias has no gradient but rounding
    optimizer = {"type": "Muon", "params": {"lr": LR / 10, "eps": 1e-6, "per_head": model == "neox"}}
    return config(MODELS[model], layout, optimizer=optimizer, gradient_clipping=0.5, train_micro_batch_size_per_gpu=2)


def given_gradients(rank: int, world_size: int, layout: dict[str, Any]) -> dict[str, Part]:
    """For the pool: by model, this rank's weights after steps with the same gradients in any layout."""
    results = {}
    for model, training in zip(MODELS, begin_each(slow(model, layout) for model in MODELS), strict=True):
        engine, groups = training.engine, training.groups
        assert isinstance(engine, NativeEngine)
        for step in range(2):
            for held in engine.shards.trained:
                generator = torch.Generator().manual_seed(mix_seed(step, held.layer, held.name))
                full = torch.randn(held.spec.shape, generator=generator)
                held.local.grad = held.slice_of(shard(full, held.spec, groups.rank("tensor"), groups.size("tensor")))
            engine._update._parts[0].optimizer.step()
            engine.shards.publish(engine.shards.trained)
        results[model] = Part([], [], groups.rank("tensor"), engine.weights(master=True))
    return results


def in_layout(rank: int, world_size: int, layout: dict[str, Any]) -> tuple[dict[str, Part], dict[str, Part]]:
    """For the pool: by model, of given gradients and of runs."""
    runs = curves(rank, world_size, [slow(model, layout) for model in MODELS], steps=2)
    return given_gradients(rank, world_size, layout), dict(zip(MODELS, runs, strict=True))


@pytest.fixture(scope="module")
def one_process() -> tuple[dict[str, Part], dict[str, Part]]:
    return run_ranks(in_layout, 1, {})[0]


@pytest.mark.parametrize("name", cells(["tp2 sp"], ["zero3"], ["dp2 x tp2 zero2", "dp2", "zero1", "dp4 zero3 by twos"]))
def test_layouts(name: str, one_process: tuple[dict[str, Part], dict[str, Part]]) -> None:
    """The same gradients give the same bits: gathered whole, a matrix is what one process has. Gradients that
    differ in their last bits are rounded to other bf16 numbers: weights are as near as lr times 2^-9."""
    ranks, layout = LAYOUTS[name]
    parts_by_rank = run_ranks(in_layout, ranks, layout, timeout=TIMEOUT)
    for model in MODELS:
        given_grads, run = (
            full_curve([parts[i][model] for parts in parts_by_rank], slow(model, layout)) for i in (0, 1)
        )
        reference_grads, curve = (full_curve([parts[model]], slow(model, {})) for parts in one_process)
        assert bit_equal(reference_grads.weights, given_grads.weights), model
        assert_alike({model: run}, {model: curve}, norms=1e-4, weights=1e-3)


def test_resumes_bit_equal(tmp_path: Path) -> None:
    assert_resumes({**slow("llama", LAYOUTS["zero3"][1]), "train_iters": 3}, tmp_path, ranks=2)
