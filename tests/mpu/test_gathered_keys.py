"""Keys gathered in parts: gradients beside one gather, the order of gathers and attention, what is kept."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.mpu import attend_in_parts, gather_keys
from tests.pool import run_ranks

NAMES = {"c10d::_allgather_base_": "gather", "c10d::_reduce_scatter_base_": "sum", "aten::bmm": "attend"}
RANKS, PLACES, BATCH, KV_HEADS, HEAD_DIM, PARTS = 2, 4, 3, 4, 8, 4


class Events(TorchDispatchMode):
    """Lists gathers, sums over ranks, and "attend" for each run of batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = NAMES.get(func._schema.name)
        if name is not None and (name, self.names[-1:]) != ("attend", ["attend"]):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Without a mask: `[places, batch, heads, head_dim]`."""
    q, keys, values = (x.permute(1, 2, 0, 3) for x in (q, keys, values))
    return ((q @ keys.transpose(-2, -1)).softmax(-1) @ values).permute(2, 0, 1, 3)


def leaves(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    q = torch.randn(PLACES, BATCH, KV_HEADS, HEAD_DIM, generator=generator)
    return q.requires_grad_(), torch.randn(PLACES, BATCH, 2, KV_HEADS, HEAD_DIM, generator=generator).requires_grad_()


def in_parts(rank: int, world_size: int, keeps_keys: bool) -> dict[str, Any]:
    """For the pool: errors of gradients beside one gather, events, and how many gathered parts live on."""
    group = dist.group.WORLD
    assert group is not None
    order = torch.tensor([0, 1, 2, 7, 3, 4, 5, 6])
    index = order.unsqueeze(1) * BATCH + torch.arange(BATCH)
    index = torch.cat([index, index[:2]])  # keys of several runs come more than once
    storages: list[StorageWeakRef] = []
    q, kv = leaves(rank)

    def attend(number: int, keys: Tensor, values: Tensor) -> Tensor:
        storages.append(StorageWeakRef(keys.untyped_storage()))
        return attention(q.chunk(PARTS, 2)[number], keys, values)

    gc.disable()
    try:
        with Events() as forward:
            out = attend_in_parts(attend, kv, group, index, PARTS, keeps_keys)
        num_alive = sum(not storage.expired() for storage in storages)
        calls = [x for x in gc.get_objects() if type(x).__name__ == "_PartGathers"]
        tensors = [x for x in tree_leaves([vars(call) for call in calls]) if isinstance(x, Tensor)]
        assert all(x is index for x in tensors), "checkpointing does not see tensors of attributes"
        with Events() as backward:
            out.square().sum().backward()
        del out
        num_left = sum(not storage.expired() for storage in storages)
    finally:
        gc.enable()
    plain_q, plain_kv = leaves(rank)
    keys, values = gather_keys(plain_kv.flatten(0, 1), group, index.flatten()).unflatten(0, index.shape).unbind(2)
    attention(plain_q, keys, values).square().sum().backward()
    pairs = (q.grad, plain_q.grad), (kv.grad, plain_kv.grad)
    errors = [float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None]
    return {
        "errors": errors,
        "forward": forward.names,
        "backward": backward.names,
        "num_alive": num_alive,
        "num_left": num_left,
    }


@pytest.mark.parametrize("keeps_keys", [False, True])
def test_gathers_overlap_with_attention(keeps_keys: bool) -> None:
    for report in run_ranks(in_parts, RANKS, keeps_keys):
        assert len(report["errors"]) == 2 and max(report["errors"]) < 1e-6
        assert report["forward"] == ["gather"] * PARTS + ["attend"]
        # Each part's sum is started before the next part's attention, and two gathers before the first.
        repeated = ["gather", "attend", "sum"] * PARTS
        expected = ["gather", *repeated[:-3], "attend", "sum"]
        assert report["backward"] == (["attend", "sum"] * PARTS if keeps_keys else expected)
        assert (report["num_alive"], report["num_left"]) == (PARTS if keeps_keys else 0, 0)
