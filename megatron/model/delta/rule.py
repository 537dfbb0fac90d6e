"""The gated delta rule with torch operations: token after token, or as matrix products over chunks of tokens.

S_t = a_t S_{t-1} + k_t d_t', d_t = b_t (v_t - (a_t S_{t-1})' k_t), y_t = S_t' q_t. The state S has a row for
each dimension of a key, a_t is a decay and b_t a rate, both from 0 to 1 (arXiv 2412.06464, section 3). In
Kimi Delta Attention each row has its decay (arXiv 2510.26692).

Shapes of the functions' arguments, for all tokens: q, k `[seq, batch, key_heads, key_dim]`; v `[seq, batch,
heads, value_dim]`; rate `[seq, batch, heads]`; log_decay (the logarithm of a) as rate, or `[seq, batch,
heads, key_dim]`. Neighbouring heads share a head of queries and keys. All is computed in fp32.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def unit_length(x: Tensor) -> Tensor:
    """Returns x in fp32, its vectors (last dimension) scaled to length 1; 1e-6 is added to their squares."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the gated delta rule for one token; returns (y, new state) in fp32.

    Arguments lack the dimension of tokens. y: shaped as v. state: before the token, `[batch, heads, key_dim,
        value_dim]`.
    """
    share = v.shape[1] // k.shape[1]
    q, k = (x.float().repeat_interleave(share, 1).unsqueeze(3) for x in (q, k))
    decayed = state.float() * _with_key_dims(log_decay, 2).float().exp().unsqueeze(3)
    change = (v.float() - (decayed * k).sum(2)) * rate.float().unsqueeze(2)
    state = decayed + k * change.unsqueeze(2)
    return (state * q).sum(2), state


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    documents: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the gated delta rule token after token; arguments and result are those of `chunk_delta_rule`."""
    state = _zeros(k, v) if initial is None else initial
    outputs = []
    for t in range(len(v)):
        if documents is not None and t > 0:
            state = state * (documents[t] == documents[t - 1]).view(-1, 1, 1, 1)
        y, state = delta_step(q[t], k[t], v[t], log_decay[t], rate[t], state)
        outputs.append(y)
    return torch.stack(outputs), state


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    chunk: int,
    documents: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the gated delta rule over all tokens; returns (y, last state) in fp32.

    y is shaped as v; the state is `[batch, heads, key_dim, value_dim]`. Within a chunk the changes d of all
    tokens solve a system of linear equations, whose matrix is lower triangular with ones on its diagonal.

    chunk: number of tokens per chunk.
    documents: `[seq, batch]`, the number of each token's document, each of which starts from a state of
        zeros; None: each row is one text.
    initial: the state before the first token; None: zeros.
    """
    if initial is not None and len(v) == 1 and documents is None:
        y, state = delta_step(q[0], k[0], v[0], log_decay[0], rate[0], initial)
        return y.unsqueeze(0), state
    seq, _, heads, _ = v.shape
    shared, chunk = (k.shape[2], heads // k.shape[2]), min(chunk, seq)
    # A token of zeros, also of rate and log_decay, changes no state. Dimensions become [chunks, batch,
    # key_heads, (heads of a key head), tokens, ..].
    missing, state = -seq % chunk, _zeros(k, v) if initial is None else initial.float()
    q, k, v = (_chunks(x.float(), missing, chunk).permute(0, 2, 3, 1, 4) for x in (q, k, v))
    log_decay, rate = (
        _chunks(_with_key_dims(x, 3), missing, chunk).permute(0, 2, 3, 1, 4).unflatten(2, shared)
        for x in (log_decay, rate.float())
    )
    q, k, v, state = q.unsqueeze(3), k.unsqueeze(3), v.unflatten(2, shared), state.unflatten(1, shared)

    # The logarithm of the decay since the chunk began. It is summed in fp64: in fp32, small differences of
    # large sums would be lost, and a document after others would give other results than the document alone.
    exponent = log_decay.double().cumsum(4)
    from_start, to_end = exponent.exp().float(), (exponent[..., -1:, :] - exponent).exp().float()
    reached = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    if documents is not None:
        numbers = _chunks(documents, missing, chunk, edge=True).permute(0, 2, 1)
        earlier = torch.cat([numbers[:1, :, 0], numbers[:-1, :, -1]])  # document of the token before each chunk
        reached = reached & (numbers.unsqueeze(3) == numbers.unsqueeze(2)).unsqueeze(2).unsqueeze(3)
        from_start = from_start * (numbers == earlier.unsqueeze(2))[:, :, None, None, :, None]
        to_end = to_end * (numbers == numbers[..., -1:])[:, :, None, None, :, None]
    decayed_products = _products_of_pairs(exponent, reached)

    # The changes d of a chunk are `free`, minus `keys_read` times the state before the chunk.
    system = decayed_products(k, k) * rate
    right_side = torch.cat([v * rate, k * from_start * rate], 5)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    free, keys_read = solved.split([v.shape[5], k.shape[5]], 5)
    scores = decayed_products(q, k)
    read, written = q * from_start, (k * to_end).transpose(4, 5)
    left = from_start[..., -1, :].unsqueeze(5)  # of the state before a chunk, at its end
    outputs = []
    for i in range(len(v)):
        change = free[i] - keys_read[i] @ state
        outputs.append(read[i] @ state + scores[i] @ change)
        state = state * left[i] + written[i] @ change
    y = torch.stack(outputs).flatten(2, 3).permute(0, 3, 1, 2, 4)
    return y.flatten(0, 1)[:seq], state.flatten(1, 2)


def _products_of_pairs(exponent: Tensor, reached: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function of a and b, `[.., tokens, key_dim]`, to the products of all pairs of tokens.

    A product, in `[.., tokens, tokens]`, is the sum over i of a_i b_i times row i's decay from b's token to
    a's.

    exponent: the logarithm of the decay since the chunk began, fp64 `[.., tokens, key_dim or 1]`.
    reached: `[.., tokens, tokens]`, False for pairs whose product is 0.
    """
    if exponent.shape[-1] == 1:
        pairs = exponent - exponent.transpose(-1, -2)
        decay = pairs.masked_fill(~reached, -torch.inf).float().exp()
        return lambda a, b: a @ b.transpose(-1, -2) * decay

    def products(a: Tensor, b: Tensor) -> Tensor:
        all_rows, tokens = [], exponent.shape[-2]
        for start in range(0, tokens, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            row_exponent, a_rows = exponent[..., rows, :], a[..., rows, :]
            # Earlier tokens: the decay to these rows' first token times that from there. Neither overflows.
            to_start = (row_exponent[..., :1, :] - exponent[..., :start, :]).exp().float()
            from_start = (row_exponent - row_exponent[..., :1, :]).exp().float()
            with_earlier = (a_rows * from_start) @ (b[..., :start, :] * to_start).transpose(-1, -2)
            pairs = (row_exponent.unsqueeze(-2) - row_exponent.unsqueeze(-3)).clamp(max=0.0).exp().float()
            with_rows = (a_rows.unsqueeze(-2) * b[..., rows, :].unsqueeze(-3) * pairs).sum(-1)
            with_later = with_rows.new_zeros(*with_rows.shape[:-1], tokens - start - with_rows.shape[-1])
            with_earlier = with_earlier.expand(*with_rows.shape[:-1], start)
            all_rows.append(torch.cat([with_earlier, with_rows, with_later], -1))
        return torch.cat(all_rows, -2).masked_fill(~reached, 0.0)

    return products


# Rows of pairs of tokens with a decay for each dimension of keys, which take memory for each of these.
_ROWS_AT_ONCE = 8


def _with_key_dims(x: Tensor, dims: int) -> Tensor:
    """Returns x with a last dimension for those of keys: of size 1 if it has only `dims` dimensions."""
    return x.unsqueeze(dims) if x.dim() == dims else x


def _zeros(k: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(*v.shape[1:3], k.shape[3], v.shape[3], dtype=torch.float32)


def _chunks(x: Tensor, missing: int, chunk: int, edge: bool = False) -> Tensor:
    """Reshapes `[seq, ..]` to `[chunks, chunk, ..]`, after padding the end with `missing` rows.

    The padding is zeros, or with `edge` copies of the last row.
    """
    padding = x[-1:].expand(missing, *x.shape[1:]) if edge else x.new_zeros(missing, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, chunk))
