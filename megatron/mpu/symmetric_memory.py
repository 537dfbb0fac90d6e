"""Products that are computed in pieces while the pieces travel between the tensor ranks of one machine, by
torch's symmetric memory (`torch.ops.symm_mem`, CUDA alone): each rank reads the others' memory over NVLink.

The sequence is the first dimension, whole `[seq, batch, features]` or cut `[seq/T, ..]`.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_product(shard: Tensor, matrix: Tensor, group: dist.ProcessGroup, keep: bool) -> tuple[Tensor | None, Tensor]:
    """The whole of `shard` `[seq/T, batch, in]`, or None unless `keep`, and its product with `matrix`
    `[in, out]`, whose first pieces are computed while others arrive."""
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    whole, products = fused(shard.contiguous(), [matrix], 0, group.group_name, return_A=keep)
    return whole, products[0]


def product_scatter(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x `[seq, batch, in]` times `matrix` `[in, out]`, summed over ranks, this rank's `[seq/T, batch, out]`;
    pieces leave while others are computed."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, group.group_name)
