"""Products in pieces that overlap with communication between tensor ranks of one machine.

They use torch's symmetric memory (`torch.ops.symm_mem`, CUDA alone): each rank reads the others' memory over
NVLink. The sequence is the first dimension, full `[seq, batch, features]` or sharded `[seq/T, ..]`.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_product(shard: Tensor, matrix: Tensor, group: dist.ProcessGroup, keep: bool) -> tuple[Tensor | None, Tensor]:
    """Gathers `shard` `[seq/T, batch, in]` and multiplies it by `matrix` `[in, out]`, in overlapping pieces.

    Returns the gathered tensor, or None unless `keep`, and the product.
    """
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    gathered, products = fused(shard.contiguous(), [matrix], 0, group.group_name, return_A=keep)
    return gathered, products[0]


def product_scatter(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x `[seq, batch, in]` times `matrix` `[in, out]`, summed over ranks, this rank's `[seq/T, batch, out]`.
    Pieces are sent while others are computed."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, group.group_name)
