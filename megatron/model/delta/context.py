"""Delta rules over rows that context ranks share: states are handed on from chunk to chunk.

A rank computes two chunks of each row. After a chunk the state is `transition @ state + added`, where `state`
is that before it (arXiv 2412.06464, section 3). One scan of a chunk gives both matrices, and what each query
reads of the state before. Ranks gather the matrices of all chunks, and multiply them in order.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.mamba.context import RowChunks
from megatron.model.mamba.mixers import recomputed
from megatron.mpu import gather_keys


def scan_shared_rows(
    rule: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    chunks: RowChunks,
    group: dist.ProcessGroup,
) -> Tensor:
    """Returns what queries of this rank's chunks read from states, fp32, shaped as v.

    Arguments are those of `model.delta.rule`, with this rank's tokens as their first dimension.

    rule: a delta rule over rows, called with `documents` and `initial`.
    """
    value_dim, key_dim = v.shape[3], k.shape[3]
    # Further columns of the state begin as the identity, and no value is written to them. They become the
    # transition.
    inputs = [
        _chunks_as_rows(x) for x in (q, k, torch.cat([v, v.new_zeros(*v.shape[:3], key_dim)], 3), log_decay, rate)
    ]
    identity = torch.eye(key_dim, device=v.device)
    initial = torch.cat([identity.new_zeros(key_dim, value_dim), identity], 1)
    initial = initial.expand(*inputs[2].shape[1:3], -1, -1)
    documents = _chunks_as_rows(chunks.documents)
    y, last = recomputed(lambda *tensors: rule(*tensors, documents=documents, initial=initial), *inputs)
    y, read = y.split([value_dim, key_dim], 3)
    gathered = gather_keys(last.unflatten(0, (2, -1)), group, chunks.order)
    start_states = recomputed(_start_states, *gathered.split([value_dim, key_dim], 4), chunks).flatten(0, 1)
    y = y + (read.movedim(0, 2) @ start_states).movedim(2, 0)
    return y.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)


def _chunks_as_rows(x: Tensor) -> Tensor:
    """Returns the chunks of each row as rows, `[places / 2, 2 * batch, ..]` from `[places, batch, ..]`."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)


def _start_states(added: Tensor, transitions: Tensor, chunks: RowChunks) -> Tensor:
    """Returns the state before each of this rank's chunks, `[2, batch, heads, key_dim, value_dim]` fp32.

    added: of all chunks, `[chunks, batch, heads, key_dim, value_dim]`. transitions: `[chunks, batch, heads,
        key_dim, key_dim]`.
    """
    goes_on = (chunks.begin[1:] == chunks.end[:-1])[:, :, None, None, None]
    states = [torch.zeros_like(added[0])]
    for i in range(len(added) - 1):
        states.append((transitions[i] @ states[i] + added[i]) * goes_on[i])
    return torch.stack(states)[chunks.numbers]
