"""Mamba's recurrence with torch operations (arXiv 2312.00752, section 3).

h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t, with a state of N numbers for each channel.
"""

from typing import Any

import torch
from torch import Tensor

_TOKENS = 16  # a recurrence steps through this many tokens; all chunks of this size run in parallel
# The number of tokens, over all rows, whose states are in memory at a time. Compiled code takes more at a
# time, because it never writes most states to memory.
AT_A_TIME, AT_A_TIME_COMPILED = 512, 2048


def linear_recurrence(decay: Tensor, update: Tensor) -> Tensor:
    """Computes h_t = decay_t h_{t-1} + update_t along the first dimension, from h_{-1} = 0; returns all h,
    shaped as `update`.

    Other dimensions of `decay` may have size 1.
    """
    length = decay.shape[0]
    if length <= _TOKENS:
        outputs = [update[0]]
        for t in range(1, length):
            outputs.append(update[t] + decay[t] * outputs[-1])
        return torch.stack(outputs)
    chunks = -(-length // _TOKENS)
    missing = chunks * _TOKENS - length
    if missing:
        decay, update = (
            torch.cat([outputs, outputs.new_zeros(missing, *outputs.shape[1:])]) for outputs in (decay, update)
        )
    decays, updates = (x.unflatten(0, (chunks, _TOKENS)) for x in (decay, update))
    reach, local = [decays[:, 0]], [updates[:, 0]]
    for t in range(1, _TOKENS):
        reach.append(decays[:, t] * reach[-1])
        local.append(updates[:, t] + decays[:, t] * local[-1])
    ends = linear_recurrence(reach[-1], local[-1])
    start_states = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    states = torch.stack(
        [local_state + decay_so_far * start_states for local_state, decay_so_far in zip(local, reach, strict=True)], 1
    )
    return states.flatten(0, 1)[:length]


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, begins: Tensor | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs Mamba's recurrence over all tokens; returns (y, last state).

    y is `[seq, batch, channels]`; the state is `[batch, channels, state]`, without gradient.

    x: shaped as y. dt: time steps, shaped as y. a: A, `[channels, state]`, negative. b, c: B and C, `[seq,
        batch, state]`.
    begins: `[seq, batch]` boolean, True at the first token of a text, which starts from a state of zeros;
        None: rows are single texts.
    initial: the state before the first token; None: zeros.

    All tensors have the same dtype, in which it computes. The states of only `AT_A_TIME` tokens are in memory
    at a time; the backward pass computes them again. Compiled code pads rows to full segments of
    `AT_A_TIME_COMPILED` tokens; each number of segments compiles its own graph.
    """
    if initial is not None and len(x) == 1 and begins is None:
        y, state = selective_step(x[0], dt[0], a, b[0], c[0], initial)
        return y.unsqueeze(0), state
    if initial is None:
        initial = x.new_zeros(x.shape[1], *a.shape)
    seq, compiling = x.shape[0], torch.compiler.is_compiling()
    segment = max(_TOKENS, (AT_A_TIME_COMPILED if compiling else AT_A_TIME) // x.shape[1])
    if compiling:  # a time step of 0 keeps the state and adds nothing to it
        missing = -seq % segment
        x, dt, b, c = (torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) for tensor in (x, dt, b, c))
        begins = None if begins is None else torch.cat([begins, begins.new_zeros(missing, begins.shape[1])])
    y, last = _SelectiveScan.apply(x, dt, a, b, c, begins, initial, segment)
    return y[:seq], last


def selective_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Runs Mamba's recurrence (`selective_scan`) for one token; returns (y, new state). y is `[batch,
    channels]`.

    x: shaped as y. dt: time steps, shaped as y. a: A, `[channels, state]`. b, c: B and C, `[batch, state]`.
    state: before the token, `[batch, channels, state]`.
    """
    state = torch.addcmul(state * torch.exp(dt.unsqueeze(2) * a), (dt * x).unsqueeze(2), b.unsqueeze(1))
    return (state @ c.unsqueeze(2)).squeeze(2), state


def _discrete(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, begins: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the decays exp(dt A) and the states of some tokens, both `[seq, batch, channels, state]`.

    begins: `[seq, batch]` boolean, True at the first token of a text; None: no text begins.
    state: before the first of these tokens, `[batch, channels, state]`.
    """
    decay = torch.exp(dt.unsqueeze(3) * a)
    if begins is not None:
        decay = decay.masked_fill(begins.unsqueeze(2).unsqueeze(3), 0.0)
    update = (dt * x).unsqueeze(3) * b.unsqueeze(2)
    update = torch.cat([(update[0] + decay[0] * state).unsqueeze(0), update[1:]])
    return decay, linear_recurrence(decay, update)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        begins: Tensor | None,
        initial: Tensor,
        segment: int,
    ) -> tuple[Tensor, Tensor]:
        state, starts, outputs = initial, [], []
        for start in range(0, x.shape[0], segment):
            rows = slice(start, start + segment)
            starts.append(state)
            _, states = _discrete(x[rows], dt[rows], a, b[rows], None if begins is None else begins[rows], state)
            outputs.append(torch.einsum("sbdn,sbn->sbd", states, c[rows]))
            state = states[-1].clone()  # a copy, because a view would keep all states in memory
        ctx.segment = segment
        ctx.save_for_backward(x, dt, a, b, c, begins, torch.stack(starts))
        last = state.clone()
        ctx.mark_non_differentiable(last)
        return torch.cat(outputs), last

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dt, a, b, c, begins, starts = ctx.saved_tensors
        grad_x, grad_dt, grad_b, grad_c = [], [], [], []
        grad_a = torch.zeros_like(a)
        grad_last = torch.zeros_like(starts[0])  # the gradient of the state after this segment
        for number in reversed(range(starts.shape[0])):
            rows = slice(number * ctx.segment, (number + 1) * ctx.segment)
            own_x, own_dt, own_b = x[rows], dt[rows], b[rows]
            own_begins = None if begins is None else begins[rows]
            decay, states = _discrete(own_x, own_dt, a, own_b, own_begins, starts[number])
            # The gradient of a state comes from its output and from the next state: the recurrence,
            # backwards.
            grad_output = grad[rows].unsqueeze(3) * c[rows].unsqueeze(2)
            grad_output = torch.cat([grad_output[:-1], (grad_output[-1] + grad_last).unsqueeze(0)])
            next_decay = torch.cat([decay[1:], torch.ones_like(decay[:1])])
            grad_state = linear_recurrence(next_decay.flip(0), grad_output.flip(0)).flip(0)
            previous = torch.cat([starts[number].unsqueeze(0), states[:-1]])
            grad_exponent = grad_state * previous * decay
            grad_input = (grad_state * own_b.unsqueeze(2)).sum(3)
            grad_x.append(grad_input * own_dt)
            grad_dt.append(grad_input * own_x + (grad_exponent * a).sum(3))
            grad_a = grad_a + torch.einsum("sbdn,sbd->dn", grad_exponent, own_dt)
            grad_b.append(torch.einsum("sbdn,sbd->sbn", grad_state, own_dt * own_x))
            grad_c.append(torch.einsum("sbdn,sbd->sbn", states, grad[rows]))
            grad_last = grad_state[0] * decay[0]
        parts = [torch.cat(part[::-1]) for part in (grad_x, grad_dt, grad_b, grad_c)]
        return parts[0], parts[1], grad_a, parts[2], parts[3], None, grad_last, None
