"""Compiled blocks beside eager ones: by Triton on a GPU, by a C++ compiler on a CPU."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from megatron.model.mamba.chunk_scan import chunk_scan
from megatron.model.specs import BlockSpec
from tests.gpu.runs import WIDE, assert_gradients, loss_and_gradients, stage_on
from tests.model.stages import document_batch, random_batch, small

pytestmark = pytest.mark.gpu
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SELECTIVE: dict[str, Any] = {"checkpoint_activations": True, "recompute_granularity": "selective"}
LLAMA: dict[str, Any] = {**WIDE, "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2}
EXPERTS: dict[str, Any] = {"moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk"}
HYBRID: dict[str, Any] = {**WIDE, "num_layers": 4, "attention_config": ["mamba2", "attention", "mamba", "mlp"],
                          "mamba_num_groups": 2, "mamba_head_dim": 16, "mamba_state_dim": 32, "mamba_chunk_size": 32,
                          "norm": "rmsnorm"}  # fmt: skip
_SLOW = pytest.mark.only_gpu("one kind of block takes long enough to compile on a CPU")


@pytest.fixture(autouse=True)
def compiler(device: torch.device) -> Iterator[None]:
    names = ("gcc", "clang") if device.type == "cuda" else ("g++",)
    if not any(map(shutil.which, names)):
        pytest.skip(f"compiling needs {' or '.join(names)}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # torch's default, which a case changes
        yield
    torch._dynamo.reset()


# bf16 is rounded at other places where operators are put together.
@pytest.mark.parametrize(("precision", "packed", "changes", "bound"), [
    pytest.param("fp32", True, LLAMA, 1e-4, id="packed"),
    pytest.param("fp32", False, {**WIDE, "gpt_j_residual": True}, 1e-4, marks=_SLOW, id="neox"),
    pytest.param("bfloat16", False, {**WIDE, "gpt_j_residual": True}, 5e-2, marks=_SLOW, id="neox bf16"),
    pytest.param("bfloat16", True, LLAMA, 5e-2, marks=_SLOW, id="packed bf16"),
    pytest.param("bfloat16", False, {**LLAMA, "sliding_window_width": 20}, 5e-2, marks=_SLOW, id="window bf16"),
    # Eager blocks without recomputation are the other side in all.
    pytest.param("bfloat16", True, {**LLAMA, **SELECTIVE}, 5e-2, marks=_SLOW, id="selective bf16"),
    pytest.param("bfloat16", True, {**LLAMA, "activation_memory_budget": 0.3}, 5e-2, marks=_SLOW, id="budget bf16"),
    pytest.param(
        "fp32", False, {**WIDE, **DROPOUT, "sliding_window_width": 20}, 1e-4, marks=_SLOW, id="window dropout"
    ),
    pytest.param("fp32", True, {**LLAMA, **EXPERTS}, 1e-4, marks=_SLOW, id="experts"),
    pytest.param("fp32", True, HYBRID, 1e-4, marks=_SLOW, id="hybrid"),
    pytest.param("bfloat16", True, HYBRID, 5e-2, marks=_SLOW, id="hybrid bf16"),
    pytest.param("fp32", False, {**WIDE, **DROPOUT}, 1e-4, marks=_SLOW, id="dropout"),
    pytest.param("bfloat16", True, {**LLAMA, **DROPOUT}, 5e-2, marks=_SLOW, id="packed dropout bf16"),
])  # fmt: skip
def test_compiled_blocks_equal_eager_ones(
    precision: str, packed: bool, changes: dict[str, Any], bound: float, device: torch.device
) -> None:
    assert_equal_to_eager(precision, packed, {"compile": "block", **changes}, bound, device)


@pytest.mark.only_gpu("a CPU has no kernels to try")
def test_blocks_of_tried_kernels_equal_eager_ones(device: torch.device) -> None:
    """block-max tries many kernels for each shape of a product. Equal widths make these shapes few."""
    changes = {**WIDE, "intermediate_size": WIDE["hidden_size"], "compile": "block-max"}
    assert_equal_to_eager("bfloat16", False, changes, 5e-2, device)


def test_compiled_chunk_scan_equals_the_eager_one(device: torch.device) -> None:
    """The chunk is as long as Mamba 2's own: Inductor of torch 2.11 breaks at sums of more than 128 rows."""
    torch.manual_seed(0)
    x, b, c = (torch.randn(512, 1, *sizes, device=device) for sizes in ((2, 16), (1, 16), (1, 16)))
    dt, a = torch.randn(512, 1, 2, device=device), -torch.rand(2, device=device)
    inputs = [tensor.requires_grad_() for tensor in (x, dt, a, b, c)]

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return chunk_scan(x, F.softplus(dt - 4), a, b, c, 256)[0]

    eager, compiled = run(*inputs), torch.compile(run, fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    for actual, expected in zip(
        *(torch.autograd.grad(out.square().sum(), inputs) for out in (compiled, eager)), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def assert_equal_to_eager(
    precision: str, packed: bool, changes: dict[str, Any], bound: float, device: torch.device
) -> None:
    results = []
    eager_keys = {key: value for key, value in changes.items() if key not in SELECTIVE}
    eager_keys |= {"compile": False, "activation_memory_budget": None}
    for values in (eager_keys, changes):
        args = small(**values, precision=precision)
        make = document_batch if packed else random_batch
        stage = stage_on(args, device).train()
        # Other documents, and as many again: nothing is compiled for them.
        results.append([loss_and_gradients(stage, make(args, seed=seed).to(device)) for seed in (0, 1)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled[0], eager[0], rtol=bound, atol=0)
        assert_gradients(compiled[1], eager[1], bound)
    kinds: list[BlockSpec] = []
    for spec in stage.blocks:
        kinds += [kind for kind in [replace(spec, index=0)] if kind not in kinds]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(kinds)
    assert not torch._dynamo.utils.counters["graph_break"]
