"""Mamba 2's recurrence in torch's own operations, as matrix products over chunks of tokens.

See arXiv 2405.21060, section 6: h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t', y_t = h_t C_t, with one A for each
head."""

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
    """Returns (y, last state); y is `[seq, batch, heads, head_dim]` in the dtype of x.

    x: as y.
    dt: `[seq, batch, heads]` fp32. a: `[heads]` fp32, negative.
    b, c: `[seq, batch, groups, state]`; neighbouring heads share a group.
    chunk: number of tokens per chunk.
    documents: as of `StateInputs`; each document starts from a state of zeros.
    initial: the state before the first token, `[batch, heads, head_dim, state]`; None: zeros.
    state_dtype: of the states passed from chunk to chunk. Decays are fp32, products in the dtype of x.
    """
    if initial is not None and len(x) == 1 and documents is None:
        y, last = chunk_step(x[0], dt[0], a, b[0], c[0], initial.to(state_dtype))
        return y.unsqueeze(0).to(x.dtype), last
    seq, batch, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    chunk = min(chunk, seq)
    missing = -seq % chunk
    # A time step of 0 keeps the state and adds nothing to it.
    x, dt, b, c = (_chunks(tensor, missing, chunk) for tensor in (x, dt, b, c))
    if documents is not None:
        documents = _chunks(documents, missing, chunk, edge=True)
    # The logarithm of all decays since a chunk began. Differences of sums in fp32 would lose what small ones
    # are made of, so that a document would not be the same behind others as alone.
    dtype, exponent = x.dtype, _prefix_sums((dt * a).double().transpose(0, 1)).transpose(0, 1)  # as dt
    scaled = (x * dt.unsqueeze(4)).to(dtype).unflatten(3, (groups, -1))

    # Within a chunk: as attention, with a product of decays as the weight of each pair of tokens.
    exact = exponent.permute(0, 2, 3, 1)
    high = exact.float()
    low = (exact - high).float()
    # [chunks, batch, heads, to, from]; as fp32, which is half the memory.
    log_decay = (high.unsqueeze(4) - high.unsqueeze(3)) + (low.unsqueeze(4) - low.unsqueeze(3))
    reached = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    if documents is not None:
        numbers = documents.permute(0, 2, 1)
        reached = reached & (numbers.unsqueeze(3) == numbers.unsqueeze(2)).unsqueeze(2)
    decay = torch.exp(log_decay.masked_fill(~reached, -torch.inf)).unflatten(2, (groups, -1))
    scores = torch.einsum("ctbgn,csbgn->cbgts", c, b)
    weights = (scores.unsqueeze(3) * decay).to(dtype)
    from_chunk = torch.einsum("cbgrts,csbgrp->ctbgrp", weights, scaled)

    # What each chunk adds to the state at its end.
    to_end = torch.exp(exponent[:, -1:] - exponent).float()
    if documents is not None:
        to_end = to_end * (documents == documents[:, -1:]).unsqueeze(3)
    decayed = scaled * to_end.to(dtype).unflatten(3, (groups, -1)).unsqueeze(5)
    added = torch.einsum("csbgn,csbgrp->cbgrpn", b, decayed).flatten(2, 3)

    # From chunk to chunk: the state before each is the sum of what all before have added, decayed. Products
    # of all pairs of chunks are few beside those within, and one graph is for any number of them.
    if initial is None:
        initial = x.new_zeros(batch, heads, head_dim, state, dtype=state_dtype)
    chunks, last_numbers = x.shape[0], None
    totals = _prefix_sums(exponent[:, -1])
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
    start_states = states[:-1].to(dtype).unflatten(2, (groups, -1))
    from_state = torch.einsum("ctbgn,cbgrpn->ctbgrp", c, start_states)
    from_state = from_state * from_start.to(dtype).unflatten(3, (groups, -1)).unsqueeze(5)
    return (from_chunk + from_state).flatten(3, 4).flatten(0, 1)[:seq], states[-1]


def chunk_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`chunk_scan` of one token: returns (y, new state) in the dtype of the state.

    x, y: `[batch, heads, head_dim]`. dt: `[batch, heads]` fp32. a: `[heads]` fp32.
    b, c: `[batch, groups, state]`. state: before the token, `[batch, heads, head_dim, state]`.
    """
    dtype, groups = state.dtype, b.shape[1]
    decay, scaled = torch.exp(dt * a).to(dtype), (x * dt.unsqueeze(2)).to(dtype)
    decayed_state = (state * decay.unsqueeze(2).unsqueeze(3)).unflatten(1, (groups, -1))
    added = scaled.unflatten(1, (groups, -1)).unsqueeze(4)
    state = torch.addcmul(
        decayed_state, added, b.to(dtype).unsqueeze(2).unsqueeze(3)
    )  # [batch, groups, heads of one, ..]
    y = state.flatten(2, 3) @ c.to(dtype).unsqueeze(3)
    return y.view_as(x), state.flatten(1, 2)


def _prefix_sums(x: Tensor) -> Tensor:
    """Computes `cumsum` over the rows of x, `[rows, ..]`, as a product with a triangular matrix of ones.

    Inductor of torch 2.11 fails to compile a `cumsum` of more than 128 rows beside a vector that is broadcast
    (pytorch#180221).
    """
    triangle = torch.ones(len(x), len(x), dtype=x.dtype, device=x.device).tril()
    return (triangle @ x.flatten(1)).view_as(x)


def _chunks(x: Tensor, missing: int, chunk: int, edge: bool = False) -> Tensor:
    """Reshapes `[seq, ..]` to `[chunks, chunk, ..]`, after padding the end with `missing` rows.

    The padding is zeros, or with edge copies of the last row.
    """
    padding = x[-1:].expand(missing, *x.shape[1:]) if edge else x.new_zeros(missing, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, chunk))
