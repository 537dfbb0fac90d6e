"""A sharded embedding computes what the whole table computes, gradients included. Linears:
test_parallel_linear.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import ParallelGroups, ParamSpec, VocabParallelEmbedding, build_groups
from tests.pool import run_ranks

SEQ, BATCH, OUT, VOCAB = 8, 2, 16, 24
TOKENS = torch.randint(0, VOCAB, (SEQ, BATCH), generator=torch.Generator().manual_seed(5))
TABLE, GRAD = (
    torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for seed, shape in ((6, (VOCAB, OUT)), (7, (SEQ, BATCH, OUT)))
)


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
        assert layer.weight.grad is not None
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
