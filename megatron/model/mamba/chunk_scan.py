"""Mamba 2's recurrence in torch's own operations, as products of matrices over chunks of tokens (arXiv
2405.21060, section 6): h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t', y_t = h_t C_t, with one A for each head."""

import torch
from torch import Tensor


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk: int,
    documents: Tensor | None = None,
    initial: Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(y, last state): y `[seq, batch, heads, head_dim]` in the dtype of x.

    x: as y. dt: `[seq, batch, heads]` fp32. a: `[heads]` fp32, negative. b, c: `[seq, batch, groups, state]`;
    neighbouring heads share a group. chunk: tokens that are taken at once. documents: as of `StateInputs`;
    states do not go from one to another. initial: the state before, `[batch, heads, head_dim, state]`; None:
    zeros. state_dtype: in which states go from chunk to chunk; decays are fp32, products in the dtype of x.
    """
    if initial is not None and len(x) == 1 and documents is None:
        y, last = chunk_step(x[0], dt[0], a, b[0], c[0], initial.to(state_dtype))
        return y.unsqueeze(0).to(x.dtype), last
    seq, batch, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    chunk = min(chunk, seq)
    missing = -seq % chunk
    # A time step of 0 keeps the state and adds nothing to it.
    x, dt, b, c = (_chunks(each, missing, chunk) for each in (x, dt, b, c))
    if documents is not None:
        documents = _chunks(documents, missing, chunk, edge=True)
    # The logarithm of all decays since a chunk began. Differences of sums in fp32 would lose what small ones
    # are made of, so that a document would not be the same behind others as alone.
    dtype, exponent = x.dtype, torch.cumsum((dt * a).double(), 1)  # [chunks, chunk, batch, heads]
    scaled = (x * dt.unsqueeze(4)).to(dtype).unflatten(3, (groups, -1))

    # Within a chunk: as attention, with a product of decays as the weight of each pair of tokens.
    whole = exponent.permute(0, 2, 3, 1)
    high = whole.float()
    low = (whole - high).float()
    # [chunks, batch, heads, to, from]; as fp32, which is half the memory.
    between = (high.unsqueeze(4) - high.unsqueeze(3)) + (low.unsqueeze(4) - low.unsqueeze(3))
    reached = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    if documents is not None:
        numbers = documents.permute(0, 2, 1)
        reached = reached & (numbers.unsqueeze(3) == numbers.unsqueeze(2)).unsqueeze(2)
    decay = torch.exp(between.masked_fill(~reached, -torch.inf)).unflatten(2, (groups, -1))
    scores = torch.einsum("ctbgn,csbgn->cbgts", c, b)
    weights = (scores.unsqueeze(3) * decay).to(dtype)
    within = torch.einsum("cbgrts,csbgrp->ctbgrp", weights, scaled)

    # What each chunk adds to the state at its end.
    to_end = torch.exp(exponent[:, -1:] - exponent).float()
    if documents is not None:
        to_end = to_end * (documents == documents[:, -1:]).unsqueeze(3)
    by_end = scaled * to_end.to(dtype).unflatten(3, (groups, -1)).unsqueeze(5)
    added = torch.einsum("csbgn,csbgrp->cbgrpn", b, by_end).flatten(2, 3)

    # From chunk to chunk: the state before each is the sum of what all before have added, decayed. Products
    # of all pairs of chunks are few beside those within, and one graph is for any number of them.
    if initial is None:
        initial = x.new_zeros(batch, heads, head_dim, state, dtype=state_dtype)
    chunks, last_numbers = x.shape[0], None
    totals = torch.cumsum(exponent[:, -1], 0)
    totals = torch.cat([torch.zeros_like(totals[:1]), totals])  # before each chunk, and behind the last
    passed = torch.ones(chunks + 1, chunks + 1, dtype=torch.bool, device=x.device).tril().unsqueeze(2)
    if documents is not None:
        last_numbers = torch.cat([documents[:1, 0], documents[:, -1]])  # of the token before each
        passed = passed & (last_numbers.unsqueeze(1) == last_numbers)
    spans = (totals.unsqueeze(1) - totals).masked_fill(~passed.unsqueeze(3), -torch.inf)
    parts = torch.cat([initial.to(state_dtype).unsqueeze(0), added.to(state_dtype)])
    states = torch.einsum("tfbh,fbhpn->tbhpn", torch.exp(spans).to(state_dtype), parts)

    # What a chunk's tokens see of the state before it.
    from_start = torch.exp(exponent).float()
    if documents is not None and last_numbers is not None:
        from_start = from_start * (documents == last_numbers[:-1].unsqueeze(1)).unsqueeze(3)
    before = states[:-1].to(dtype).unflatten(2, (groups, -1))
    across = torch.einsum("ctbgn,cbgrpn->ctbgrp", c, before)
    across = across * from_start.to(dtype).unflatten(3, (groups, -1)).unsqueeze(5)
    return (within + across).flatten(3, 4).flatten(0, 1)[:seq], states[-1]


def chunk_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`chunk_scan` of one token: (y, the state behind it), y `[batch, heads, head_dim]`; in the dtype of the
    state.

    x: as y. dt: `[batch, heads]` fp32. a: `[heads]` fp32. b, c: `[batch, groups, state]`. state: before the
    token, `[batch, heads, head_dim, state]`.
    """
    dtype, groups = state.dtype, b.shape[1]
    decay, scaled = torch.exp(dt * a).to(dtype), (x * dt.unsqueeze(2)).to(dtype)
    kept = (state * decay.unsqueeze(2).unsqueeze(3)).unflatten(1, (groups, -1))
    added = scaled.unflatten(1, (groups, -1)).unsqueeze(4)
    state = torch.addcmul(kept, added, b.to(dtype).unsqueeze(2).unsqueeze(3))  # [batch, groups, heads of one, ..]
    y = state.flatten(2, 3) @ c.to(dtype).unsqueeze(3)
    return y.view_as(x), state.flatten(1, 2)


def _chunks(x: Tensor, missing: int, chunk: int, edge: bool = False) -> Tensor:
    """`[seq, ..]` as `[chunks, chunk, ..]`, with `missing` more of zeros, or (edge) of the last, at the
    end."""
    rest = x[-1:].expand(missing, *x.shape[1:]) if edge else x.new_zeros(missing, *x.shape[1:])
    return torch.cat([x, rest]).unflatten(0, (-1, chunk))
