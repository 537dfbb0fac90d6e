"""Mamba's recurrence in torch's own operations: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t, with
a state of N numbers for each channel (arXiv 2312.00752, section 3)."""

from typing import Any

import torch
from torch import Tensor

_TOKENS = 16  # that a recurrence takes one by one, while all chunks of so many run side by side
# Tokens of all rows whose states are in memory at a time; compiled, where most are never written, more.
AT_A_TIME, AT_A_TIME_COMPILED = 512, 2048


def linear_recurrence(decay: Tensor, update: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + update_t along the first dimension, from h_{-1} = 0; decay may have
    dimensions of size 1 behind it."""
    length = decay.shape[0]
    if length <= _TOKENS:
        each = [update[0]]
        for t in range(1, length):
            each.append(update[t] + decay[t] * each[-1])
        return torch.stack(each)
    chunks = -(-length // _TOKENS)
    missing = chunks * _TOKENS - length
    if missing:
        decay, update = (torch.cat([each, each.new_zeros(missing, *each.shape[1:])]) for each in (decay, update))
    decays, updates = (x.unflatten(0, (chunks, _TOKENS)) for x in (decay, update))
    reach, own = [decays[:, 0]], [updates[:, 0]]
    for t in range(1, _TOKENS):
        reach.append(decays[:, t] * reach[-1])
        own.append(updates[:, t] + decays[:, t] * own[-1])
    ends = linear_recurrence(reach[-1], own[-1])
    before = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    states = torch.stack([mine + far * before for mine, far in zip(own, reach, strict=True)], 1)
    return states.flatten(0, 1)[:length]


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    begins: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, last state): y `[seq, batch, channels]`.

    x, dt: `[seq, batch, channels]`. a: `[channels, state]`, negative. b, c: `[seq, batch, state]`. begins:
    `[seq, batch]` boolean, tokens that begin a text, which the state before does not reach. initial: the
    state before, `[batch, channels, state]`; None: zeros. The last state has no gradient. All are of one
    dtype, in which it is computed. Memory for the states of `AT_A_TIME` tokens, which backward makes again.
    Compiled, rows count in whole segments of AT_A_TIME_COMPILED: another number of these is another graph.
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
        x, dt, b, c = (torch.cat([each, each.new_zeros(missing, *each.shape[1:])]) for each in (x, dt, b, c))
        begins = None if begins is None else torch.cat([begins, begins.new_zeros(missing, begins.shape[1])])
    y, last = _SelectiveScan.apply(x, dt, a, b, c, begins, initial, segment)
    return y[:seq], last


def selective_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`selective_scan` of one token: (y, the state behind it), y `[batch, channels]`.

    x, dt: `[batch, channels]`. a: `[channels, state]`. b, c: `[batch, state]`. state: before the token,
    `[batch, channels, state]`.
    """
    state = torch.addcmul(state * torch.exp(dt.unsqueeze(2) * a), (dt * x).unsqueeze(2), b.unsqueeze(1))
    return (state @ c.unsqueeze(2)).squeeze(2), state


def _discrete(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, begins: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor]:
    """The decays of some tokens and their states, both `[seq, batch, channels, state]`."""
    decay = torch.exp(dt.unsqueeze(3) * a)
    if begins is not None:
        decay = decay.masked_fill(begins.unsqueeze(2).unsqueeze(3), 0.0)
    update = (dt * x).unsqueeze(3) * b.unsqueeze(2)
    update = torch.cat([(update[0] + decay[0] * before).unsqueeze(0), update[1:]])
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
        for first in range(0, x.shape[0], segment):
            here = slice(first, first + segment)
            starts.append(state)
            _, states = _discrete(x[here], dt[here], a, b[here], None if begins is None else begins[here], state)
            outputs.append(torch.einsum("sbdn,sbn->sbd", states, c[here]))
            state = states[-1].clone()  # no view, which would keep all of them
        ctx.segment = segment
        ctx.save_for_backward(x, dt, a, b, c, begins, torch.stack(starts))
        last = state.clone()
        ctx.mark_non_differentiable(last)
        return torch.cat(outputs), last

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dt, a, b, c, begins, starts = ctx.saved_tensors
        of_x, of_dt, of_b, of_c = [], [], [], []
        of_a = torch.zeros_like(a)
        later = torch.zeros_like(starts[0])  # the gradient of the state before the segment behind
        for number in reversed(range(starts.shape[0])):
            here = slice(number * ctx.segment, (number + 1) * ctx.segment)
            own_x, own_dt, own_b = x[here], dt[here], b[here]
            decay, states = _discrete(
                own_x, own_dt, a, own_b, None if begins is None else begins[here], starts[number]
            )  # fmt: skip
            # The gradient of a state: of its output, and of the next state; the recurrence backwards.
            of_output = grad[here].unsqueeze(3) * c[here].unsqueeze(2)
            of_output = torch.cat([of_output[:-1], (of_output[-1] + later).unsqueeze(0)])
            next_decay = torch.cat([decay[1:], torch.ones_like(decay[:1])])
            of_state = linear_recurrence(next_decay.flip(0), of_output.flip(0)).flip(0)
            before = torch.cat([starts[number].unsqueeze(0), states[:-1]])
            of_exponent = of_state * before * decay
            of_input = (of_state * own_b.unsqueeze(2)).sum(3)
            of_x.append(of_input * own_dt)
            of_dt.append(of_input * own_x + (of_exponent * a).sum(3))
            of_a = of_a + torch.einsum("sbdn,sbd->dn", of_exponent, own_dt)
            of_b.append(torch.einsum("sbdn,sbd->sbn", of_state, own_dt * own_x))
            of_c.append(torch.einsum("sbdn,sbd->sbn", states, grad[here]))
            later = of_state[0] * decay[0]
        parts = [torch.cat(part[::-1]) for part in (of_x, of_dt, of_b, of_c)]
        return parts[0], parts[1], of_a, parts[2], parts[3], None, later, None
