"""Sharded linears and embeddings compute what the whole layer computes, gradients included."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import Linear, LinearSpec, ParallelGroups, ParamSpec, VocabParallelEmbedding, build_groups
from megatron.mpu.layers import Parallel
from tests.pool import run_ranks

SEQ, BATCH, IN, OUT, VOCAB = 8, 2, 12, 16, 24
PARALLEL: tuple[Parallel, ...] = ("column", "row", "none")


class Result(NamedTuple):
    """A layer's output and gradients on one rank."""

    out: Tensor
    grad_x: Tensor | None
    grad_weight: Tensor
    grad_bias: Tensor | None


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, WEIGHT, BIAS, GRAD = (
    _random(1, SEQ, BATCH, IN),
    _random(2, OUT, IN),
    _random(3, OUT),
    _random(4, SEQ, BATCH, OUT),
)
TOKENS = torch.randint(0, VOCAB, (SEQ, BATCH), generator=torch.Generator().manual_seed(5))
TABLE, GRAD_EMBEDDED = _random(6, VOCAB, OUT), _random(7, SEQ, BATCH, OUT)


def _groups(world_size: int) -> ParallelGroups:
    if world_size == 1:
        return ParallelGroups.single()
    return build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu"))


def linears(rank: int, world_size: int) -> dict[tuple[Parallel, bool, bool], Result]:
    groups, results = _groups(world_size), {}
    part = slice(rank * SEQ // world_size, (rank + 1) * SEQ // world_size)
    for parallel in PARALLEL:
        for bias in (False, True):
            for sequence in (False, True) if parallel != "none" else (False,):
                layer = Linear(LinearSpec(IN, OUT, parallel, bias), groups, sequence)
                x, grad, weight, offset = X, GRAD, WEIGHT, BIAS
                if parallel == "column":
                    weight, offset, grad = (
                        WEIGHT.chunk(world_size)[rank], BIAS.chunk(world_size)[rank], GRAD.chunk(world_size, -1)[rank]
                    )  # fmt: skip
                    x = X[part] if sequence else X
                elif parallel == "row":
                    weight, x = WEIGHT.chunk(world_size, 1)[rank], X.chunk(world_size, -1)[rank]
                    grad = GRAD[part] if sequence else GRAD
                with torch.no_grad():
                    layer.weight.copy_(weight)
                    if layer.bias is not None:
                        layer.bias.copy_(offset)
                x = x.clone().requires_grad_()
                y = layer(x)
                y.backward(grad)
                grad_bias = layer.bias.grad if layer.bias is not None else None
                assert layer.weight.grad is not None
                results[parallel, bias, sequence] = Result(y.detach(), x.grad, layer.weight.grad, grad_bias)
    return results


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> Result:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    offset = bias.clone().requires_grad_() if bias is not None else None
    y = F.linear(x, weight, offset)
    y.backward(grad)
    assert weight.grad is not None
    return Result(y.detach(), x.grad, weight.grad, offset.grad if offset is not None else None)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_linear_equals_the_unsharded_layer(world_size: int) -> None:
    ranks = [linears(0, 1)] if world_size == 1 else run_ranks(linears, world_size)
    for (parallel, bias, sequence), _ in ranks[0].items():
        parts = [rank_results[parallel, bias, sequence] for rank_results in ranks]
        expected = _whole(X, WEIGHT, BIAS if bias else None, GRAD)

        def check(got: list[Tensor | None], whole: Tensor | None, dim: int | None, label: str) -> None:
            """dim: how the ranks' parts make the whole; None where every rank holds it."""
            label = f"{parallel}, bias {bias}, sequence parallel {sequence}: {label}"  # noqa: B023
            if whole is None:
                assert got == [None] * len(got), label
                return
            tensors = [t for t in got if t is not None]
            assert len(tensors) == len(got), label
            bias_sum_over_tensor = [torch.cat(tensors, dim)] if dim is not None else tensors
            for tensor in bias_sum_over_tensor:
                torch.testing.assert_close(tensor, whole, rtol=1e-5, atol=1e-5, msg=lambda m: f"{label}: {m}")

        out_dim = {"column": -1, "row": 0 if sequence else None, "none": None}[parallel]
        in_dim = {"column": 0 if sequence else None, "row": -1, "none": None}[parallel]
        check([p.out for p in parts], expected.out, out_dim, "output")
        check([p.grad_x for p in parts], expected.grad_x, in_dim, "gradient of the input")
        weight_dim = {"column": 0, "row": 1, "none": None}[parallel]
        check([p.grad_weight for p in parts], expected.grad_weight, weight_dim, "gradient of the weight")
        # A row's bias is one copy a rank, and every copy has the whole gradient: also under sequence
        # parallelism.
        check(
            [p.grad_bias for p in parts],
            expected.grad_bias,
            0 if parallel == "column" else None,
            "bias gradient",
        )


def embeddings(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    groups, results = _groups(world_size), []
    part = slice(rank * SEQ // world_size, (rank + 1) * SEQ // world_size)
    for sequence in (False, True):
        layer = VocabParallelEmbedding([ParamSpec("weight", (VOCAB, OUT), 0, (VOCAB,))], groups, sequence)
        with torch.no_grad():
            layer.weight.copy_(TABLE.chunk(world_size)[rank])
        y = layer(TOKENS)
        y.backward(GRAD_EMBEDDED[part] if sequence else GRAD_EMBEDDED)
        assert layer.weight.grad is not None
        results.append((y.detach(), layer.weight.grad))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_embedding_equals_the_unsharded_table(world_size: int) -> None:
    ranks = [embeddings(0, 1)] if world_size == 1 else run_ranks(embeddings, world_size)
    table = TABLE.clone().requires_grad_()
    expected = F.embedding(TOKENS, table)
    expected.backward(GRAD_EMBEDDED)
    for sequence in (False, True):
        outs = [rank_results[sequence][0] for rank_results in ranks]
        for out in [torch.cat(outs)] if sequence else outs:
            torch.testing.assert_close(out, expected.detach(), rtol=0, atol=0)
        torch.testing.assert_close(
            torch.cat([rank_results[sequence][1] for rank_results in ranks]), table.grad, rtol=1e-6, atol=1e-6
        )
