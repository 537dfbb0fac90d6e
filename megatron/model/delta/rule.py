"""The gated delta rule with torch operations: token after token, or as matrix products over chunks of tokens.

S_t = a_t S_{t-1} + k_t d_t', d_t = b_t (v_t - a_t S_{t-1}' k_t), y_t = S_t' q_t. The state S has a row for
each dimension of a key, a_t is a decay and b_t a rate, both from 0 to 1 (arXiv 2412.06464, section 3).

Shapes of the functions' arguments, for all tokens: q, k `[seq, batch, key_heads, key_dim]`; v `[seq, batch,
heads, value_dim]`; log_decay (the logarithm of a) and rate `[seq, batch, heads]`. Neighbouring heads share
a head of queries and keys. All is computed in fp32.
"""

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
    state = state.float() * log_decay.float().exp().unsqueeze(2).unsqueeze(3)
    change = (v.float() - (state * k).sum(2)) * rate.float().unsqueeze(2)
    state = state + k * change.unsqueeze(2)
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
    log_decay, rate = (_chunks(x, missing, chunk).permute(0, 2, 3, 1).unflatten(2, shared) for x in (log_decay, rate))
    q, k, v, state = q.unsqueeze(3), k.unsqueeze(3), v.unflatten(2, shared), state.unflatten(1, shared)
    rate = rate.float().unsqueeze(5)

    # The logarithm of the decay since the chunk began. It is summed in fp64: in fp32, small differences of
    # large sums would be lost, and a document after others would give other results than the document alone.
    exponent = log_decay.double().cumsum(4)
    from_start, to_end = exponent.exp().float(), (exponent[..., -1:] - exponent).exp().float()
    reached = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    if documents is not None:
        numbers = _chunks(documents, missing, chunk, edge=True).permute(0, 2, 1)
        earlier = torch.cat([numbers[:1, :, 0], numbers[:-1, :, -1]])  # document of the token before each chunk
        reached = reached & (numbers.unsqueeze(3) == numbers.unsqueeze(2)).unsqueeze(2).unsqueeze(3)
        from_start = from_start * (numbers == earlier.unsqueeze(2)).unsqueeze(2).unsqueeze(3)
        to_end = to_end * (numbers == numbers[..., -1:]).unsqueeze(2).unsqueeze(3)
    pairs = exponent.unsqueeze(5) - exponent.unsqueeze(4)
    decay = pairs.masked_fill(~reached, -torch.inf).float().exp()

    # The changes d of a chunk are `free`, minus `keys_read` times the state before the chunk.
    system = k @ k.transpose(4, 5) * decay * rate
    right_side = torch.cat([v * rate, k * from_start.unsqueeze(5) * rate], 5)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    free, keys_read = solved.split([v.shape[5], k.shape[5]], 5)
    scores = q @ k.transpose(4, 5) * decay
    read, written = q * from_start.unsqueeze(5), (k * to_end.unsqueeze(5)).transpose(4, 5)
    left = from_start[..., -1:].unsqueeze(5)  # of the state before a chunk, at its end
    outputs = []
    for i in range(len(v)):
        change = free[i] - keys_read[i] @ state
        outputs.append(read[i] @ state + scores[i] @ change)
        state = state * left[i] + written[i] @ change
    y = torch.stack(outputs).flatten(2, 3).permute(0, 3, 1, 2, 4)
    return y.flatten(0, 1)[:seq], state.flatten(1, 2)


def _zeros(k: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(*v.shape[1:3], k.shape[3], v.shape[3], dtype=torch.float32)


def _chunks(x: Tensor, missing: int, chunk: int, edge: bool = False) -> Tensor:
    """Reshapes `[seq, ..]` to `[chunks, chunk, ..]`, after padding the end with `missing` rows.

    The padding is zeros, or with `edge` copies of the last row.
    """
    padding = x[-1:].expand(missing, *x.shape[1:]) if edge else x.new_zeros(missing, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, chunk))
