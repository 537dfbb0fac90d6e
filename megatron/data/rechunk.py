"""Batches of long rows read as more, shorter ones (`seq_curriculum`)."""

from dataclasses import replace

import torch

from megatron.data.batch import Batch


def rechunk(batch: Batch, length: int) -> Batch:
    """The same tokens and labels in rows of `length`, which divides theirs: [batch * seq / length, length].

    Documents that go on over a new row's beginning begin there again, for attention and positions alike.
    """
    rows, seq = batch.tokens.shape
    if seq == length:
        return batch
    cuts = torch.arange(length)
    cut = batch.map(lambda tensor: tensor.reshape(-1, length) if tensor.shape == (rows, seq) else tensor)
    positions = None if cut.positions is None else torch.minimum(cut.positions, cuts)
    cu_seqlens = None
    if batch.cu_seqlens is not None:
        begins = torch.zeros(rows, seq + 1, dtype=torch.bool).scatter_(1, batch.cu_seqlens.long(), True)[:, :-1]
        begins = begins.reshape(-1, length)
        begins[:, 0] = True
        # Beginnings first, in their order; `length` fills the rest
        starts = torch.where(begins, cuts, length).sort(dim=1).values
        cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=length).int()
    return replace(cut, positions=positions, cu_seqlens=cu_seqlens)
