"""Parallel linears as in a block beside torch's: values, gradients, what is kept, what travels when."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.mpu import Linear, LinearSpec, build_groups, parallel_linear, row_parallel_sum
from tests.mpu.test_products import Scaled
from tests.pool import run_ranks

SEQ, BATCH, HIDDEN, INNER = 8, 3, 10, 12
COLUMNS, ROWS = ("mlp_in", "attention_in"), ("mlp_out", "attention_out")
SHAPES = {name: (INNER, HIDDEN) for name in COLUMNS} | {name: (HIDDEN, INNER) for name in ROWS}
FULL_SHAPE = (SEQ, BATCH, HIDDEN)


class Case(NamedTuple):
    """trained: have gradients. mode: "eager", "compiled", "recomputed". pipelined: symmetric memory."""

    sequence: bool
    trained: tuple[str, ...] = ("x", "weight", "bias")
    mode: str = "eager"
    scaled: bool = False
    pipelined: bool = False
    dtype: torch.dtype = torch.float32


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _values() -> dict[str, Tensor]:
    values = {f"{name}.weight": _random(i, *shape) / 4 for i, (name, shape) in enumerate(SHAPES.items())}
    values |= {f"{name}.bias": _random(10 + i, shape[0]) for i, (name, shape) in enumerate(SHAPES.items())}
    return values | {"x": _random(20, SEQ, BATCH, HIDDEN), "grad": _random(21, SEQ, BATCH, HIDDEN)}


class Layers(nn.Module):
    """x + a row after a column, then both rows' sum after both columns, as of a parallel residual."""

    def __init__(self, groups: Any, case: Case) -> None:
        super().__init__()
        for name, (out_features, in_features) in SHAPES.items():
            spec = LinearSpec(in_features, out_features, "column" if name in COLUMNS else "row", bias=True)
            layer = Linear(spec, groups, case.sequence)
            if case.scaled:
                layer.product = Scaled(1.0)
            layer.async_tensor_parallel = case.pipelined
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(torch.tanh(self.attention_in(x)))
        inner = [torch.tanh(getattr(self, name)(x)) for name in COLUMNS]
        return x + row_parallel_sum([getattr(self, name) for name in ROWS], inner)


def _full(trained: tuple[str, ...]) -> dict[str, Tensor]:
    values = _values()
    for name, tensor in values.items():
        tensor.requires_grad_(name.rpartition(".")[2] in trained)

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, values[f"{name}.weight"], values[f"{name}.bias"])

    x = values["x"]
    x = x + layer("attention_out", torch.tanh(layer("attention_in", x)))
    x = x + sum(layer(row, torch.tanh(layer(column, x))) for column, row in zip(COLUMNS, ROWS, strict=True))
    x.backward(values["grad"])
    return {"y": x.detach()} | {name: tensor.grad for name, tensor in values.items() if tensor.grad is not None}


def _part(name: str, full: Tensor, case: Case, rank: int, size: int) -> Tensor:
    """A rank's part of a parameter, input, output, or gradient of one."""
    if name in ("x", "y", "grad"):
        return full.chunk(size)[rank] if case.sequence else full
    layer, _, kind = name.partition(".")
    if layer in COLUMNS:
        return full.chunk(size)[rank]
    return full.chunk(size, 1)[rank] if kind == "weight" else full


class RankResult(NamedTuple):
    """Output and gradients of one rank, events of its backward, shapes of clones and of saved tensors."""

    tensors: dict[str, Tensor]
    backward: list[tuple[str, tuple[int, ...]]]
    clones: list[tuple[int, ...]]
    saved: list[tuple[int, ...]]


class Recorder(TorchDispatchMode):
    """Notes collectives with their larger tensor's shape, products with their result's, and "wait"."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.clones: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::clone":
            self.clones.append(tuple(out.shape))
        if name in ("aten::mm", "aten::addmm"):
            self.events.append(("product", tuple(out.shape)))
        elif name.startswith("c10d::"):
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self.events.append((name, tuple(max(tensors, key=Tensor.numel).shape)))
        return out

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enter it, with the waits for what was started."""
        finish = parallel_linear.finish

        def noted(started: Any) -> Tensor:
            self.events.append(("wait", ()))
            return finish(started)

        with mock.patch.object(parallel_linear, "finish", noted), self:
            yield


def run(rank: int, world_size: int, cases: list[Case]) -> list[RankResult]:
    groups = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu"))
    library = torch.library.Library("symm_mem", "IMPL")  # torch's own twins of its kernels, which it has for CUDA alone
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    values, results = _values(), []
    for case in cases:
        layers = Layers(groups, case)
        for name, parameter in layers.named_parameters():
            parameter.data.copy_(_part(name, values[name], case, rank, world_size))
            parameter.requires_grad_(name.rpartition(".")[2] in case.trained)
        layers.to(case.dtype)
        x, grad = (_part(name, values[name], case, rank, world_size).clone().to(case.dtype) for name in ("x", "grad"))
        x.requires_grad_("x" in case.trained)
        if case.mode == "compiled":
            layers.compile(backend="aot_eager", fullgraph=True)
        parameters = {p.untyped_storage().data_ptr() for p in layers.parameters()}
        saved: list[tuple[int, ...]] = []

        def keep(tensor: Tensor, parameters: set[int] = parameters, saved: list[Any] = saved) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters:
                saved.append(tuple(tensor.shape))
            return tensor

        forward, backward = Recorder(), Recorder()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with forward.recording() if case.mode == "eager" else nullcontext():
                y = checkpoint(layers, x, use_reentrant=False) if case.mode == "recomputed" else layers(x)
        with backward.recording() if case.mode != "compiled" else nullcontext():
            y.backward(grad)
        tensors = {"y": y.detach()} | ({} if x.grad is None else {"x": x.grad})
        tensors |= {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
        results.append(RankResult(tensors, backward.events, forward.clones + backward.clones, saved))
    return results


PARTLY = [("weight",), ("x",), ("x", "bias"), ("bias",)]
CASES = [
    *(Case(sequence) for sequence in (False, True)), *(Case(sequence, mode="recomputed") for sequence in (False, True)),
    *(Case(sequence, trained) for sequence in (False, True) for trained in PARTLY),
    *(Case(sequence, scaled=True) for sequence in (False, True)), Case(True, mode="recomputed", pipelined=True),
    *(Case(True, trained, pipelined=True) for trained in [("x", "weight", "bias"), *PARTLY]),
]  # fmt: skip
COMPILED = [Case(sequence, mode="compiled") for sequence in (False, True)] + [
    Case(True, mode="compiled", pipelined=True)
]
ON_FOUR = [*CASES, Case(False, mode="compiled", scaled=True)]
CASES += COMPILED


def assert_as_one_process(ranks: list[list[RankResult]], cases: list[Case]) -> None:
    """Sums over ranks are in another order: fp32's rounding of sums of some 30 terms of size 1."""
    for i, case in enumerate(cases):
        expected = _full(case.trained)
        for rank, results in enumerate(ranks):
            assert results[i].tensors.keys() == expected.keys(), case
            for name, full in expected.items():
                reference = _part(name, full, case, rank, len(ranks))
                difference = (results[i].tensors[name] - reference).abs().max()
                assert difference <= 2e-6 * reference.abs().max() + 1e-6, (case, name, difference)


@pytest.fixture(scope="module")
def rank_results() -> list[list[RankResult]]:
    return run_ranks(run, 2, CASES)


def test_as_one_process(rank_results: list[list[RankResult]]) -> None:
    assert_as_one_process(rank_results, CASES)


@pytest.mark.product
def test_as_one_process_on_four_ranks() -> None:
    assert_as_one_process(run_ranks(run, 4, ON_FOUR), ON_FOUR)


def test_bf16_gradients_are_bf16() -> None:
    for results in run_ranks(run, 2, [Case(sequence, dtype=torch.bfloat16) for sequence in (False, True)]):
        for result in results:
            assert {tensor.dtype for tensor in result.tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_the_shard_is_kept(mode: str, rank_results: list[list[RankResult]]) -> None:
    """Under sequence parallelism: nothing of the whole sequence, but of each column a rank's input."""
    elements = SEQ * BATCH * HIDDEN
    for results in rank_results:
        saved = results[CASES.index(Case(True, mode=mode))].saved
        sizes = [torch.Size(shape).numel() for shape in saved]
        assert elements not in sizes, saved
        assert sizes.count(elements // 2) == (3 if mode == "eager" else 2), saved  # a compiled graph keeps one once


def column_backward(sequence: bool) -> list[tuple[str, tuple[int, ...]]]:
    """One linear on two ranks: the input's gradient is sent while the weight's is multiplied."""
    input_grad, weight_grad = ("product", (SEQ * BATCH, HIDDEN)), ("product", (INNER // 2, HIDDEN))
    if not sequence:
        return [input_grad, ("c10d::allreduce_", FULL_SHAPE), weight_grad, ("wait", ())]
    gather, scatter = ("c10d::_allgather_base_", FULL_SHAPE), ("c10d::_reduce_scatter_base_", FULL_SHAPE)
    return [gather, input_grad, scatter, ("wait", ()), weight_grad, ("wait", ())]


def row_backward(sequence: bool, layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """A sum of linears: one gather for all products; torch's own takes the weight's gradient first."""
    input_grad, weight_grad = ("product", (SEQ * BATCH, INNER // 2)), ("product", (HIDDEN, INNER // 2))
    gather = [("c10d::_allgather_base_", FULL_SHAPE)] if sequence else []
    return [*gather, *[weight_grad, input_grad] * layers]


@pytest.mark.parametrize("sequence", [False, True])
def test_what_travels_and_when(sequence: bool, rank_results: list[list[RankResult]]) -> None:
    """The order of backward is fixed, and nothing is cloned."""
    for results in rank_results:
        _, events, clones, _ = results[CASES.index(Case(sequence))]
        columns, rows = column_backward(sequence), row_backward(sequence, 1)
        assert sorted(events) == sorted([*columns * 3, *row_backward(sequence, 2), *rows])
        start = [i for i in range(len(events)) if events[i : i + len(columns)] == columns]
        assert len(start) == 3 and clones == [], (events, clones)


def test_recomputation_sends_no_last_sum_again(rank_results: list[list[RankResult]]) -> None:
    """Recomputation ends before the last rows' products and their sum, which backward does not need."""
    for sequence, kind in ((False, "c10d::allreduce_"), (True, "c10d::_reduce_scatter_base_")):
        for results in rank_results:
            cases = [results[CASES.index(Case(sequence, mode=mode))] for mode in ("eager", "recomputed")]
            eager, recomputed = ([event[0] for event in case.backward].count(kind) for case in cases)
            assert recomputed == eager + 1
