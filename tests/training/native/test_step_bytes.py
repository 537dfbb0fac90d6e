"""benchmarks/step_bytes.py counts what is known, of the bare loop and of the native engine."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.step_bytes import BARE, Traffic, forward_backward_bytes, parse, settings, step_traffic
from benchmarks.train_throughput import bare_step, random_batch
from megatron.launch import process_info
from megatron.mpu import init_model_parallel
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training.setup import build_engine
from tests.pool import run_ranks


def adamw(scale: bool) -> Callable[[], Any]:
    optimizer: Any = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1024))], fused=True)
    param = optimizer.param_groups[0]["params"][0]

    def step() -> None:
        param.grad = torch.empty(1024)
        optimizer.grad_scale = torch.ones(()) if scale else None
        optimizer.step()

    return step


X, HALF = torch.zeros(1024), torch.zeros(1024, dtype=torch.bfloat16)


@pytest.mark.parametrize(("operation", "bytes_per_element"), [
    (lambda: X + 1, 8),
    (lambda: X.add_(HALF), 10),
    (lambda: X.copy_(HALF), 6),
    (lambda: X.zero_(), 4),
    (lambda: X.view(32, 32).t()[4:].detach(), 0),
    (lambda: X[:1].expand(1024).to(torch.bfloat16), 2),
    (lambda: torch.add(X, X, out=torch.empty(1024)), 8),
    (lambda: torch._foreach_mul_([X, HALF], 2.0), 12),
    (lambda: torch._foreach_copy_([HALF], [X]), 6),
    (lambda: torch.cat([X, X]), 12),
    (adamw(scale=False), 28),
    (adamw(scale=True), 32),
], ids=lambda value: str(value) if isinstance(value, int) else "")  # fmt: skip
def test_one_operation(operation: Callable[[], Any], bytes_per_element: int) -> None:
    """Bytes for each of 1024 elements, by hand."""
    operation()
    with Traffic() as traffic:
        operation()
    assert traffic.moved.total() / 1024 == pytest.approx(bytes_per_element, abs=0.1), traffic.moved


def moved_by_one_rank(rank: int, world_size: int) -> dict[str, float]:
    """For the pool: bytes per parameter of the bare loop and the native engine, beside both passes."""
    from megatron.training.native.engine import NativeEngine

    args = settings(parse(["--layers", "2", "--hidden", "128"]), 1, 0)
    groups = init_model_parallel(args, process_info(), logging.getLogger("benchmark"))
    batch = random_batch(args, groups.device, None)
    passes, params = forward_backward_bytes(args, groups, batch, LANGUAGE_MODELLING)
    engine = build_engine(args, groups, engine=NativeEngine)
    bare = bare_step(args, groups, batch, torch.bfloat16)
    fused = build_engine(args.replace(fused_update=True), groups, engine=NativeEngine)
    halved = [build_engine(args.replace(optimizer_state_dtype="bf16", fused_update=fused), groups, engine=NativeEngine)
              for fused in (False, True)]  # fmt: skip
    steps = {BARE: bare, "native": lambda: engine.train_step([batch], args.lr),
             "fused": lambda: fused.train_step([batch], args.lr),
             "bf16 moments": lambda: halved[0].train_step([batch], args.lr),
             "fused, bf16 moments": lambda: halved[1].train_step([batch], args.lr)}  # fmt: skip
    return {name: (step_traffic(step).moved.total() - passes) / params for name, step in steps.items()}


def test_the_bytes_of_a_step() -> None:
    """Bare: gradients to fp32 (6), norm (4), clipping (8), AdamW (28), weights to bf16 (6). The native
    engine's AdamW clips (32), so it reads gradients one time less. Fused: gradients in bf16 to the norm (2)
    and to an update (2) of weights and moments (24) that writes bf16 weights (2). bf16 moments: 8 less, and
    unfused 4 more, as our own update writes no divided gradients."""
    bytes_moved = run_ranks(moved_by_one_rank, 1)[0]
    fused = {"fused": 30.0, "fused, bf16 moments": 22.0}
    assert bytes_moved == pytest.approx({BARE: 52.0, "native": 48.0, "bf16 moments": 36.0, **fused}, abs=0.2)
