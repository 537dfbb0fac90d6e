"""`compile: auto`: what it chooses where, and what is said of it."""

from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError
from megatron.training import compile_blocks
from megatron.training.compile_blocks import choose_compile, resolve_compile
from tests.model.stages import gradients, random_batch, random_weights, small, stage_with
from tests.pool import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NO_FP8: dict[str, Any] = {"precision_fp8": "off"}
FP8: dict[str, Any] = {"precision_fp8": "auto", "precision": "bfloat16", "num_layers": 3}
ZERO_3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("values", "engine", "device", "capability", "triton", "programs", "compile_", "reason"),
    [
        ({}, "native", GPU, (9, 0), True, {"gcc"}, "block", "auto: Triton and a C compiler are here"),
        (
            {},
            "native",
            GPU,
            (9, 0),
            True,
            {"clang"},
            "block",
            "auto: Triton and a C compiler are here; block-max, for long runs in bf16 on Hopper",
        ),
        ({}, "native", GPU, (8, 0), True, {"gcc"}, "block", "auto: Triton and a C compiler are here"),
        (NO_FP8, "native", GPU, (9, 0), True, {"gcc"}, "block-max", "auto: bf16 on Hopper by precision_fp8 (program)"),
        (NO_FP8, "native", GPU, (8, 0), True, {"gcc"}, "block", "auto: Triton and a C compiler are here"),
        (FP8, "native", GPU, (9, 0), True, {"gcc"}, "block", "auto: Triton and a C compiler are here"),
        ({}, "native", GPU, (9, 0), True, {"g++"}, False, "auto: no C compiler (gcc or clang) on the PATH"),
        ({}, "native", GPU, (9, 0), False, {"gcc"}, False, "auto: Triton is not installed"),
        ({}, "native", GPU, (6, 1), True, {"gcc"}, False, "auto: Triton needs compute capability 7.0, found 6.1"),
        ({}, "native", CPU, (0, 0), True, {"gcc", "g++"}, False, "auto: not on CPUs"),
        ({"te_backend": "transformer_engine"}, "native", GPU, (9, 0), True, {"gcc"}, False, "auto: te_backend is"),
        (ZERO_3, "native", GPU, (9, 0), True, {"gcc"}, "block", "auto: Triton"),
        (ZERO_3, "deepspeed", GPU, (9, 0), True, {"gcc"}, False, "auto: DeepSpeed's ZeRO 3 has hooks within blocks"),
        ({"compile": "block-max"}, "native", CPU, (0, 0), False, set(), "block-max", "program"),
        ({"compile": False}, "native", GPU, (9, 0), True, {"gcc"}, False, "program"),
    ],
)
def test_auto(
    values: dict[str, Any], engine: str, device: torch.device, capability: tuple[int, int], triton: bool,
    programs: set[str], compile_: Any, reason: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(compile_blocks, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(compile_blocks.shutil, "which", lambda name: name if name in programs else None)
    choice = choose_compile(small(**values), device, engine)
    assert choice.compile == compile_ and choice.reason.startswith(reason)


def test_the_choice_is_printed_once_and_stands_in_the_configuration() -> None:
    lines: list[str] = []
    args = resolve_compile(small(), CPU, "native", lines.append)
    assert lines == ["compile: false (auto: not on CPUs, where it takes longer than it saves)"]
    assert args.compile is False and args.origin("compile") == "default"
    assert resolve_compile(args, CPU, "native", lines.append) is args and len(lines) == 1


def test_hooks_within_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="compile: DeepSpeed's ZeRO 3 has hooks within blocks.* engine: native"):
        resolve_compile(small(compile="block", **ZERO_3), CPU, "deepspeed", None)


def test_a_memory_budget_needs_compiled_blocks() -> None:
    refused = r"activation_memory_budget: 0.5 is kept by the compiler, but compile is off \(auto: not on CPUs"
    with pytest.raises(ConfigError, match=refused):
        resolve_compile(small(activation_memory_budget=0.5), CPU, "native", None)
    resolve_compile(small(activation_memory_budget=0.5, compile="block"), CPU, "native", None)


@pytest.mark.parametrize(("compile_", "mode"), [("block", {}), ("block-max", {"mode": "max-autotune-no-cudagraphs"})])
def test_modes(compile_: str, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **options: given.append(options))
    monkeypatch.setattr(compile_blocks.shutil, "which", lambda name: name)
    args = small(compile=compile_)
    compile_blocks.compile_blocks(build_stage(args, ParallelGroups.single()), args)
    assert given == [{"fullgraph": True, **mode}] * args.num_layers


def kept(rank: int, world_size: int, budgets: list[float]) -> list[tuple[int, dict[tuple[int, str], Tensor]]]:
    """For the pool: bytes that blocks keep for the backward pass under each budget, and gradients."""
    partitioned = "aot_eager_decomp_partition"  # cut as for Inductor, then run operator by operator
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=partitioned)  # type: ignore[assignment]
    results = []
    for budget in budgets:
        torch.compiler.reset()
        args = small(hidden_size=64, seq_length=32, compile="block", activation_memory_budget=budget)
        stage, sizes = stage_with(args, random_weights(args)).train(), list[int]()
        weights = {p.data_ptr() for p in stage.parameters()}

        def keep(x: Tensor, sizes: list[int] = sizes, weights: set[int] = weights) -> Tensor:
            sizes.append(0 if x.data_ptr() in weights else x.numel() * x.element_size())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = stage(None, random_batch(args))
        out.square().sum().backward()
        results.append((sum(sizes), gradients(stage)))
    return results


def test_a_memory_budget_keeps_less_and_changes_no_gradient() -> None:
    (all_of_it, plain), (half, some), (least, none) = run_ranks(kept, 1, [1.0, 0.5, 0.0])[0]
    assert all_of_it > half > least
    for name, gradient in plain.items():
        torch.testing.assert_close(some[name], gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(none[name], gradient, rtol=1e-5, atol=1e-6)
