"""Choices at the start and their notes, and a stand-in for Transformer-Engine compared with torch."""

import re
from dataclasses import replace
from functools import partialmethod
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.model import build_stage
from megatron.model.norm_functions import TORCH_NORMS
from megatron.mpu import Linear, ParallelGroups, gpu_kernels
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training import apex, compile_blocks
from megatron.training.apex import use_apex_norms, uses_apex
from megatron.training.compile_blocks import choose_compile, resolve_compile
from megatron.training.parallelize import use_async_tensor_parallel
from megatron.training.transformer_engine import choose_te_backend, use_transformer_engine_norms
from tests.model.stages import gradients, make_stage, random_batch, random_weights, small
from tests.pool import run_ranks
from tests.stand_ins import installed
from tests.training.runs import ADAMW, LLAMA, NEOX, config, curves, full_curve, furthest
from tests.training.test_fp8 import products

# -- compile
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NO_FP8: dict[str, Any] = {"precision_fp8": "off"}
FP8: dict[str, Any] = {"precision_fp8": "auto", "precision": "bfloat16", "num_layers": 3}
ZERO_3: dict[str, Any] = {"zero_optimization": {"stage": 3}}
TRITON_NOTE = "auto: Triton and a C compiler"


@pytest.mark.parametrize(("values", "engine", "device", "capability", "triton", "programs", "compile_", "reason"), [
    ({}, "native", GPU, (9, 0), True, {"gcc"}, "block", TRITON_NOTE),
    ({}, "native", GPU, (9, 0), True, {"clang"}, "block", f"{TRITON_NOTE}.*Hopper.*block-max"),
    ({}, "native", GPU, (8, 0), True, {"gcc"}, "block", TRITON_NOTE),
    (NO_FP8, "native", GPU, (9, 0), True, {"gcc"}, "block-max", "auto: .*Hopper.*precision_fp8"),
    (NO_FP8, "native", GPU, (8, 0), True, {"gcc"}, "block", TRITON_NOTE),
    (NO_FP8, "native", GPU, (10, 0), True, {"gcc"}, "block", rf"{TRITON_NOTE}.*9\.0.*compile: block-max"),
    ({**NO_FP8, "deterministic_mode": True}, "native", GPU, (9, 0), True, {"gcc"}, "block", TRITON_NOTE),
    (FP8, "native", GPU, (9, 0), True, {"gcc"}, "block", TRITON_NOTE),
    ({}, "native", GPU, (9, 0), True, {"g++"}, False, "auto: no C compiler.*gcc or clang"),
    ({}, "native", GPU, (9, 0), False, {"gcc"}, False, "auto: Triton"),
    ({}, "native", GPU, (6, 1), True, {"gcc"}, False, "auto: Triton.*7.0.*6.1"),
    ({}, "native", CPU, (0, 0), True, {"gcc", "g++"}, False, "auto: .*CPU"),
    ({"te_backend": "transformer_engine"}, "native", GPU, (9, 0), True, {"gcc"}, False, "auto: te_backend"),
    (ZERO_3, "native", GPU, (9, 0), True, {"gcc"}, "block", TRITON_NOTE),
    (ZERO_3, "deepspeed", GPU, (9, 0), True, {"gcc"}, False, "auto: .*DeepSpeed.*ZeRO 3"),
    ({"compile": "block-max"}, "native", CPU, (0, 0), False, set(), "block-max", "program"),
    ({"compile": False}, "native", GPU, (9, 0), True, {"gcc"}, False, "program"),
])  # fmt: skip
def test_compile_auto(
    values: dict[str, Any], engine: str, device: torch.device, capability: tuple[int, int], triton: bool,
    programs: set[str], compile_: Any, reason: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(compile_blocks, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(compile_blocks.shutil, "which", lambda name: name if name in programs else None)
    choice, its_reason = choose_compile(small(**values), device, engine)
    assert choice == compile_ and re.match(reason, its_reason)


def test_the_choice_is_printed_once_and_stands_in_the_configuration() -> None:
    lines: list[str] = []
    args = resolve_compile(small(), CPU, "native", lines.append)
    assert len(lines) == 1 and re.match("compile: false .*auto.*CPU", lines[0])
    assert args.compile is False and args.origin("compile") == "default"
    assert resolve_compile(args, CPU, "native", lines.append) is args and len(lines) == 1


def test_what_cannot_be_compiled_is_refused() -> None:
    """Blocks with hooks within them; and a memory budget without compiled blocks."""
    with pytest.raises(ConfigError, match="compile: .*DeepSpeed's ZeRO 3.* engine: native"):
        resolve_compile(small(compile="block", **ZERO_3), CPU, "deepspeed", print)
    with pytest.raises(ConfigError, match="activation_memory_budget: 0.5 .*compile.*auto.*CPU"):
        resolve_compile(small(activation_memory_budget=0.5), CPU, "native", print)
    resolve_compile(small(activation_memory_budget=0.5, compile="block"), CPU, "native", print)


@pytest.mark.parametrize(("compile_", "mode"), [("block", {}), ("block-max", {"mode": "max-autotune-no-cudagraphs"})])
def test_modes(compile_: str, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **options: compile_options.append(options))
    monkeypatch.setattr(compile_blocks.shutil, "which", lambda name: name)
    args = small(compile=compile_)
    compile_blocks.compile_blocks(build_stage(args, ParallelGroups.single()), args)
    assert compile_options == [{"fullgraph": True, **mode}] * args.num_layers


def saved_for_backward(
    rank: int, world_size: int, budgets: list[float]
) -> list[tuple[int, dict[tuple[int, str], Tensor]]]:
    """For the pool: bytes that blocks keep for the backward pass under each budget, and gradients."""
    partitioned = "aot_eager_decomp_partition"  # cut as for Inductor, then run operator by operator
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=partitioned)  # type: ignore[assignment]
    results = []
    for budget in budgets:
        torch.compiler.reset()
        args = small(num_layers=1, hidden_size=64, seq_length=32, compile="block", activation_memory_budget=budget)
        stage, sizes = make_stage(args, random_weights(args)).train(), list[int]()
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
    (full_bytes, full_gradients), (half_bytes, half_gradients), (least_bytes, least_gradients) = run_ranks(
        saved_for_backward, 1, [1.0, 0.5, 0.0]
    )[0]
    assert full_bytes > half_bytes > least_bytes
    for budget_gradients in (half_gradients, least_gradients):
        torch.testing.assert_close(budget_gradients, full_gradients, rtol=1e-5, atol=1e-6)


# -- async_tensor_parallel
SPLIT = {"model_parallel_size": 2, "sequence_parallel": True}
NOT_SPLIT = "sequence_parallel: true.*model_parallel_size"


@pytest.mark.parametrize(("values", "device", "gpus", "missing"), [
    ({}, GPU, {}, NOT_SPLIT),
    ({"model_parallel_size": 2}, GPU, {}, NOT_SPLIT),
    (SPLIT, torch.device("cpu"), {}, "GPU.*cpu"),
    (SPLIT, GPU, {"capability": (7, 5)}, "8.0.*T4.*7.5"),
    (SPLIT, GPU, {"ranks": 1}, "2 tensor ranks.*1 ranks"),
    (SPLIT, GPU, {"reach": False}, "NVLink.*cuda:0.*cuda:1"),
    (SPLIT, GPU, {}, None),
    (SPLIT, GPU, {"visible": 1, "reach": False}, None),
    (SPLIT, GPU, {"ran": {}}, "set async_tensor_parallel: true"),
])  # fmt: skip
def test_async_tensor_parallel(
    values: dict[str, Any], device: torch.device, gpus: dict[str, Any], missing: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One rank takes its groups for those of two tensor ranks on this device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus.get("capability", (9, 0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus.get("visible", 2))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda source, peer: gpus.get("reach", True))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(gpus.get("ranks", 2)))
    monkeypatch.setattr(gpu_kernels, "RUN_ON", gpus.get("ran", {"async_tensor_parallel: true": gpu_kernels.EVERY_GPU}))
    for requested in (False, True, "auto"):
        lines: list[str] = []
        args, groups = small(**values, async_tensor_parallel=requested), ParallelGroups.single()
        stage = build_stage(small(), groups)
        if args.tp > 1:
            handles = MappingProxyType({**groups.handles, "tensor": mock.Mock()})
            sizes = MappingProxyType({**groups.sizes, "tensor": 2})
            groups = replace(groups, handles=handles, sizes=sizes, world_size=2)
        groups = replace(groups, device=device)
        if requested is True and missing is not None and "ran" not in gpus:
            with pytest.raises(ConfigError, match=f"async_tensor_parallel: true.*{missing}"):
                use_async_tensor_parallel(stage, args, groups, lines.append)
            continue
        use_async_tensor_parallel(stage, args, groups, lines.append)
        chosen = {module.async_tensor_parallel for module in stage.modules() if isinstance(module, Linear)}
        assert chosen == {bool(requested) and (missing is None or requested is True)}
        assert len(lines) == (requested == "auto")
        assert all(re.search(f"auto chose {str(missing is None).lower()}: .*{missing or ''}", line) for line in lines)


# -- te_backend
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "precision": "bfloat16"}


def _args(**overrides: Any) -> NeoXArgs:
    return NeoXArgs.from_dict(config(LLAMA, WIDE, {"padded_vocab_size": 384}, **overrides)).for_world(1)


def _classes_and_line(**overrides: Any) -> tuple[set[str], str]:
    """The classes of the products of a model, and the line about FP8."""
    classes, (line,) = products(**WIDE, **overrides)
    return set(classes.values()), line


def test_auto_takes_the_package_for_delayed_scaling_where_it_works() -> None:
    with installed("transformer_engine"):
        classes, line = _classes_and_line(precision_fp8="te")
        assert "EngineDelayedProduct" in classes and "te_backend: auto chose transformer_engine" in line
        classes, line = _classes_and_line(te_fp8_mha=True)
        assert "EngineDelayedProduct" in classes
        for keys in ({"precision_fp8": "tensorwise"}, {"precision_fp8": "te", "te_backend": "native"}):
            classes, line = _classes_and_line(**keys)
            assert not any(name.startswith("Engine") for name in classes) and "te_backend" not in line
        classes, line = _classes_and_line(precision_fp8="te", compile="block")
        assert "DelayedProduct" in classes and re.search("auto chose native.*compile: false", line)
    classes, line = _classes_and_line(precision_fp8="te")
    assert "DelayedProduct" in classes and re.search("auto chose native.*Transformer-Engine", line)


def test_auto_takes_no_package_that_has_run_on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    args, lines = _args(precision_fp8="te", apex="auto"), list[str]()
    stage = build_stage(args, ParallelGroups.single())
    stage.device_of_groups = GPU
    with installed("transformer_engine", "apex"):
        chosen, words = choose_te_backend(args, "te", GPU)
        use_apex_norms(stage, args, "native", lines.append)
    monkeypatch.setattr(apex, "apex_problem", lambda device: None)
    assert not chosen and "set te_backend: transformer_engine " in words
    assert not uses_apex(args, GPU) and "set apex: true " in lines[0]


@pytest.mark.parametrize("recipe, product", [("te", "EngineDelayedProduct"), ("mxfp8", "EngineProduct")])
def test_a_named_package_multiplies(recipe: str, product: str) -> None:
    with installed("transformer_engine"):
        classes, line = _classes_and_line(precision_fp8=recipe, te_backend="transformer_engine")
    assert classes == {product, "PlainProduct"} and re.search("Transformer-Engine.*te_backend", line)


@pytest.mark.parametrize("keys, is_installed, words", [
    ({"precision_fp8": "te"}, False, "Transformer-Engine.*pip install"),
    ({"precision_fp8": "rowwise"}, True, "precision_fp8: te, tensorwise, mxfp8 or off.*rowwise"),
    ({"precision_fp8": "te", "compile": "block"}, True, "compile: false.*block"),
])  # fmt: skip
def test_packages_that_do_not_fit_are_refused(keys: dict[str, Any], is_installed: bool, words: str) -> None:
    args = _args(**keys, te_backend="transformer_engine")
    with (
        installed(*["transformer_engine"][:is_installed]),
        pytest.raises(ConfigError, match=f"te_backend: transformer_engine.*{words}.*te_backend: native"),
    ):
        choose_te_backend(args, args.precision_fp8, CPU)


def test_norms_are_the_packages_where_it_is_named() -> None:
    for backend in ("native", "transformer_engine"):
        stage, lines = build_stage(_args(te_backend=backend), ParallelGroups.single()), list[str]()
        with installed("transformer_engine"):
            use_transformer_engine_norms(stage, _args(te_backend=backend), None, lines.append)
        norms = {module.functions for module in stage.modules() if hasattr(module, "functions")}
        assert (norms == {TORCH_NORMS}) is (backend == "native") is (not lines)


@pytest.mark.parametrize(("keys", "facts"), [
    ({}, "te_backend: transformer_engine .*Transformer-Engine"), ({"apex": True}, "apex: te_backend"),
])  # fmt: skip
def test_norms_of_a_package_that_is_not_there_are_refused(keys: dict[str, Any], facts: str) -> None:
    args = _args(te_backend="transformer_engine", **keys)
    with pytest.raises(ConfigError, match=facts):
        use_transformer_engine_norms(build_stage(args, ParallelGroups.single()), args, None, print)


def _curves(rank: int, world_size: int, configs: list[dict[str, Any]]) -> Any:
    with installed("transformer_engine"):
        return curves(rank, world_size, configs, steps=3)


@pytest.mark.parametrize("model", [NEOX, LLAMA], ids=["layernorm", "rmsnorm"])
def test_tensor_parallel_runs_equal_those_by_torch(model: dict[str, Any]) -> None:
    """In fp32 the norms; in bf16 FP8 with a scale a matrix, whose bits are nearly the same."""
    exact = config(ADAMW, model, engine="native", train_micro_batch_size_per_gpu=4, model_parallel_size=2)
    rounded = {**exact, **WIDE, "precision_fp8": "tensorwise", "first_last_layers_bf16": False}
    pairs = [(values, {**values, "te_backend": "transformer_engine"}) for values in (exact, rounded)]
    ranks = run_ranks(_curves, 2, [values for pair in pairs for values in pair])
    for i, bound in ((0, 1e-5), (2, 5e-3)):
        torchs, engine_curve = (full_curve([parts[j] for parts in ranks], pairs[i // 2][0]) for j in (i, i + 1))
        loss, norm, weights = furthest(engine_curve, torchs)
        assert loss < bound and norm < 20 * bound and weights > 0.0
