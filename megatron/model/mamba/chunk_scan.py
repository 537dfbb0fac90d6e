"""Mamba 2's recurrence with torch operations, as matrix products over chunks of tokens.

h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t', y_t = h_t C_t, with one A for each head (arXiv 2405.21060, section
6).
"""

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
    """Runs Mamba 2's recurrence over all tokens; returns (y, last state).

    y is `[seq, batch, heads, head_dim]` in the dtype of x; the state is `[batch, heads, head_dim, state]`.

    x: shaped as y.
    dt: time steps, `[seq, batch, heads]` fp32.
    a: A, `[heads]` fp32, negative.
    b, c: B and C, `[seq, batch, groups, state]`; neighbouring heads share a group.
    chunk: number of tokens per chunk.
    documents: `[seq, batch]`, the number of each token's document, each of which starts from a state of
        zeros; None: each row is one text.
    initial: the state before the first token; None: zeros.
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
    # The logarithm of the decay since the chunk began. It is summed in fp64: in fp32, small differences of
    # large sums would be lost, and a document after others would give other results than the document alone.
    dtype, exponent = x.dtype, _prefix_sums((dt * a).double().transpose(0, 1)).transpose(0, 1)  # shaped as dt
    scaled = (x * dt.unsqueeze(4)).to(dtype).unflatten(3, (groups, -1))

    # Within a chunk: like attention, where each pair of tokens is weighted by the decay between them.
    exact = exponent.permute(0, 2, 3, 1)
    high = exact.float()
    low = (exact - high).float()
    # [chunks, batch, heads, to, from]; in fp32, which takes half the memory of fp64.
    log_decay = (high.unsqueeze(4) - high.unsqueeze(3)) + (low.unsqueeze(4) - low.unsqueeze(3))
    reached = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    if documents is not None:
        numbers = documents.permute(0, 2, 1)
        reached = reached & (numbers.unsqueeze(3) == numbers.unsqueeze(2)).unsqueeze(2)
    decay = torch.exp(log_decay.masked_fill(~reached, -torch.inf)).unflatten(2, (groups, -1))
    scores = torch.einsum("ctbgn,csbgn->cbgts", c, b)
    weights = (scores.unsqueeze(3) * decay).to(dtype)
    from_chunk = torch.einsum("cbgrts,csbgrp->ctbgrp", weights, scaled)

    # The state that each chunk's own tokens add up to at its end.
    to_end = torch.exp(exponent[:, -1:] - exponent).float()
    if documents is not None:
        to_end = to_end * (documents == documents[:, -1:]).unsqueeze(3)
    decayed = scaled * to_end.to(dtype).unflatten(3, (groups, -1)).unsqueeze(5)
    added = torch.einsum("csbgn,csbgrp->cbgrpn", b, decayed).flatten(2, 3)

    # From chunk to chunk: the state before a chunk is the sum of the states that earlier chunks added,
    # decayed. Products of all pairs of chunks are few compared with those within chunks, and one graph serves
    # any number of chunks.
    if initial is None:
        initial = x.new_zeros(batch, heads, head_dim, state, dtype=state_dtype)
    chunks, last_numbers = x.shape[0], None
    totals = _prefix_sums(exponent[:, -1])
    totals = torch.cat([torch.zeros_like(totals[:1]), totals])  # before each chunk, and after the last one
    passed = torch.ones(chunks + 1, chunks + 1, dtype=torch.bool, device=x.device).tril().unsqueeze(2)
    if documents is not None:
        last_numbers = torch.cat([documents[:1, 0], documents[:, -1]])  # document of the token before each chunk
        passed = passed & (last_numbers.unsqueeze(1) == last_numbers)
    spans = (totals.unsqueeze(1) - totals).masked_fill(~passed.unsqueeze(3), -torch.inf)
    parts = torch.cat([initial.to(state_dtype).unsqueeze(0), added.to(state_dtype)])
    states = torch.einsum("tfbh,fbhpn->tbhpn", torch.exp(spans).to(state_dtype), parts)

    # The part of a chunk's outputs that comes from the state before the chunk.
    from_start = torch.exp(exponent).float()
    if documents is not None and last_numbers is not None:
        from_start = from_start * (documents == last_numbers[:-1].unsqueeze(1)).unsqueeze(3)
    start_states = states[:-1].to(dtype).unflatten(2, (groups, -1))
    from_state = torch.einsum("ctbgn,cbgrpn->ctbgrp", c, start_states)
    from_state = from_state * from_start.to(dtype).unflatten(3, (groups, -1)).unsqueeze(5)
    return (from_chunk + from_state).flatten(3, 4).flatten(0, 1)[:seq], states[-1]


def chunk_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Runs Mamba 2's recurrence (`chunk_scan`) for one token; returns (y, new state) in the dtype of the
    state.

    x, y: `[batch, heads, head_dim]`. dt: time steps, `[batch, heads]` fp32. a: A, `[heads]` fp32, negative.
    b, c: B and C, `[batch, groups, state]`. state: before the token, `[batch, heads, head_dim, state]`.
    """
    dtype, groups = state.dtype, b.shape[1]
    decay, scaled = torch.exp(dt * a).to(dtype), (x * dt.unsqueeze(2)).to(dtype)
    decayed_state = (state * decay.unsqueeze(2).unsqueeze(3)).unflatten(1, (groups, -1))
    added = scaled.unflatten(1, (groups, -1)).unsqueeze(4)
    state = torch.addcmul(
        decayed_state, added, b.to(dtype).unsqueeze(2).unsqueeze(3)
    )  # [batch, groups, heads of a group, ..]
    y = state.flatten(2, 3) @ c.to(dtype).unsqueeze(3)
    return y.view_as(x), state.flatten(1, 2)


def _prefix_sums(x: Tensor) -> Tensor:
    """Computes `cumsum` over the first dimension of x, as a product with a triangular matrix of ones.

    Inductor of torch 2.11 fails to compile a `cumsum` of more than 128 rows next to a vector that is
    broadcast (pytorch#180221).
    """
    triangle = torch.ones(len(x), len(x), dtype=x.dtype, device=x.device).tril()
    return (triangle @ x.flatten(1)).view_as(x)


def prefix_sums(x: Tensor) -> Tensor:
    """Does what `_prefix_sums` does, for any number of rows, with matrices of 128 x 128."""
    if len(x) <= 128:
        return _prefix_sums(x)
    blocks = _chunks(x, -len(x) % 128, 128)
    sums = _prefix_sums(blocks.transpose(0, 1)).transpose(0, 1)
    totals = sums[:, -1]
    return (sums + (prefix_sums(totals) - totals).unsqueeze(1)).flatten(0, 1)[: len(x)]


def _chunks(x: Tensor, missing: int, chunk: int, edge: bool = False) -> Tensor:
    """Reshapes `[seq, ..]` to `[chunks, chunk, ..]`, after padding the end with `missing` rows.

    The padding is zeros, or with `edge` copies of the last row.
    """
    padding = x[-1:].expand(missing, *x.shape[1:]) if edge else x.new_zeros(missing, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, chunk))
