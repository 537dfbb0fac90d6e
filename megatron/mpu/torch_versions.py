"""Names that differ between the supported releases of torch, 2.11 and 2.13; no other file distinguishes
them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# torch 2.13 renames these and warns of the old names; 2.11 knows only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: tuple[int, int], scale: float | None
) -> Tensor:
    """Returns torch's flash attention within documents, `[tokens, heads, head_dim]`; k and v may have fewer
    heads.

    starts: `[n]` int32, the first index of each document, then the number of tokens.
    longest: length of the longest document.
    window: how many keys before and after itself a query sees; -1: all.
    """
    from torch.nn.attention import varlen

    shared = k.shape[1] != q.shape[1]
    if shared and _RELEASE < (2, 13):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if shared and _RELEASE >= (2, 13) else {}
    out = varlen.varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window, scale=scale, **options)
    assert isinstance(out, Tensor)
    return out


def all_gather_streams(module: nn.Module) -> tuple[torch.cuda.Stream, ...]:
    """Returns the CUDA streams on which `fully_shard` gathers the weights of this module and its submodules.

    Returns () for a module without `fully_shard`. Call it after a first forward pass. The streams are for
    `set_post_optim_event`: then a step waits for the optimizer once, not at each gather.
    """
    if not isinstance(module, FSDPModule):
        return ()
    context = module._get_fsdp_state()._comm_ctx
    return context.all_gather_copy_in_stream, context.all_gather_stream


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Lets the ranks of a group read each other's memory. From torch 2.13 on this needs no call, so it does
    nothing."""
    if _RELEASE < (2, 13):
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(group.group_name)
