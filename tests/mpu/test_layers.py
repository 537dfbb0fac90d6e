"""A sharded embedding and every collective compute what the whole does. Linears: test_parallel_linear.py."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.mpu import ParallelGroups, ParamSpec, VocabParallelEmbedding, build_groups
from tests.pool import run_ranks

SEQ, BATCH, OUT, VOCAB = 8, 2, 16, 24
TOKENS = torch.randint(0, VOCAB, (SEQ, BATCH), generator=torch.Generator().manual_seed(5))
TABLE, GRAD = (
    torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for seed, shape in ((6, (VOCAB, OUT)), (7, (SEQ, BATCH, OUT)))
)
MAPPINGS = ("copy_to_tensor", "reduce_from_tensor", "gather_from_sequence", "scatter_to_sequence")


def embeddings(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """For the pool: outputs and the table's gradients, without sequence parallelism and with it."""
    groups, results = ParallelGroups.single(), []
    if world_size > 1:
        groups = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu"))
    for sequence in (False, True):
        layer = VocabParallelEmbedding([ParamSpec("weight", (VOCAB, OUT), 0, (VOCAB,))], groups, sequence)
        with torch.no_grad():
            layer.weight.copy_(TABLE.chunk(world_size)[rank])
        y = layer(TOKENS)
        y.backward(GRAD.chunk(world_size)[rank] if sequence else GRAD)
        results.append((y.detach(), layer.weight.grad))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_embedding_equals_the_unsharded_table(world_size: int) -> None:
    ranks = [embeddings(0, 1)] if world_size == 1 else run_ranks(embeddings, world_size)
    table = TABLE.clone().requires_grad_()
    expected = F.embedding(TOKENS, table)
    expected.backward(GRAD)
    for sequence in (False, True):
        outs, grads = zip(*(rank_results[sequence] for rank_results in ranks), strict=True)
        for out in [torch.cat(outs)] if sequence else outs:
            torch.testing.assert_close(out, expected.detach(), rtol=0, atol=0)
        torch.testing.assert_close(torch.cat(grads), table.grad, rtol=1e-6, atol=1e-6)


def _values(name: str, rank: int) -> Tensor:
    seed = sum(name.encode()) * 100 + rank
    return torch.randn(SEQ, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_all(rank: int, world_size: int, compiled: bool) -> dict[str, tuple[Tensor, Tensor]]:
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    part = SEQ // world_size
    local_slice = slice(rank * part, (rank + 1) * part)
    results = {}
    for name in MAPPINGS:
        # scatter_to_sequence takes what every rank holds alike; the other inputs differ by rank.
        x = _values("x", 0 if name == "scatter_to_sequence" else rank)
        x = (x[local_slice] if name == "gather_from_sequence" else x).clone().requires_grad_()
        mapping = getattr(mpu, name)
        # Inside a graph, as in a block: torch 2.11 drops what a compiled backward writes in place.
        in_graph = torch.compile(lambda x, f=mapping: f(2 * x, group) / 2, backend="aot_eager")
        y = in_graph(x) if compiled else mapping(x, group)
        grad = _values("grad", rank)
        y.backward(grad[local_slice] if name == "scatter_to_sequence" else grad)
        results[name] = (y.detach(), x.grad)
    return results


# In compiled blocks: test_parallel_linear.py, too.
@pytest.mark.parametrize(
    ("world_size", "compiled"), [(2, False), (4, False), pytest.param(2, True, marks=pytest.mark.product)]
)
def test_mappings_equal_the_full_computation(world_size: int, compiled: bool) -> None:
    ranks, part = run_ranks(run_all, world_size, compiled), SEQ // world_size
    x, grad = (torch.stack([_values(name, r) for r in range(world_size)]) for name in ("x", "grad"))
    slices = [slice(r * part, (r + 1) * part) for r in range(world_size)]
    gathered, gathered_grad = (torch.cat([t[r][slices[r]] for r in range(world_size)]) for t in (x, grad))
    for r, results in enumerate(ranks):
        expected: dict[str, tuple[Tensor, Tensor]] = {
            # Adjoint pairs: identity and all-reduce, all-gather and reduce-scatter, own chunk and all-gather.
            # A sum that every rank uses alike passes its gradient on as it is.
            "copy_to_tensor": (x[r], grad.sum(0)),
            "reduce_from_tensor": (x.sum(0), grad[r]),
            "gather_from_sequence": (gathered, grad.sum(0)[slices[r]]),
            "scatter_to_sequence": (x[0][slices[r]], gathered_grad),
        }
        assert results.keys() == expected.keys()
        for name, (y, gradient) in expected.items():
            for label, actual, reference in (("output", results[name][0], y), ("gradient", results[name][1], gradient)):
                assert torch.allclose(actual, reference, rtol=1e-12, atol=1e-12), f"{name}: {label} of rank {r}"


def check_inputs(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    x = _values("x", rank).transpose(0, 1)  # not contiguous
    x_before = x.clone()
    y = mpu.reduce_from_tensor(x, group)
    assert torch.equal(x, x_before)
    full = mpu.gather_from_tensor(x.clone().requires_grad_(), group)
    assert not full.requires_grad
    return y, full


def test_sum_is_out_of_place_and_last_dimension_is_gathered() -> None:
    parts = [_values("x", r).transpose(0, 1) for r in range(2)]
    for y, full in run_ranks(check_inputs, 2):
        torch.testing.assert_close(y, parts[0] + parts[1])
        assert torch.equal(full, torch.cat(parts, -1))


@pytest.mark.parametrize("name", [*MAPPINGS, "gather_from_tensor"])
def test_without_a_group_nothing_happens(name: str) -> None:
    x: Any = torch.ones(2)
    assert getattr(mpu, name)(x, None) is x
