"""A token by itself, behind a state, as scans of the whole text have it."""

import pytest
import torch

from megatron.model.mamba.chunk_scan import chunk_scan, chunk_step
from megatron.model.mamba.convolution import causal_convolution
from megatron.model.mamba.selective_scan import selective_scan, selective_step

SEQ, BATCH, CHANNELS, STATE, HEADS, GROUPS = 70, 3, 12, 5, 6, 2


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_selective_step() -> None:
    x, dt, a = random(SEQ, BATCH, CHANNELS), random(SEQ, BATCH, CHANNELS).exp(), -random(CHANNELS, STATE).exp()
    b, c = random(SEQ, BATCH, STATE), random(SEQ, BATCH, STATE + 0).flip(0)
    expected, last = selective_scan(x, dt, a, b, c)
    state, outputs = torch.zeros_like(last), []
    for t in range(SEQ):
        y, state = selective_step(x[t], dt[t], a, b[t], c[t], state)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs), expected)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("chunk", [2, 16, 256])  # 2: more chunks than a recurrence takes at once
def test_chunk_step(chunk: int) -> None:
    x, dt = random(SEQ, BATCH, HEADS, CHANNELS).float(), random(SEQ, BATCH, HEADS).float().exp()
    a = -random(HEADS).exp().float()
    b, c = random(SEQ, BATCH, GROUPS, STATE).float(), random(SEQ, BATCH, GROUPS, STATE).float().flip(0)
    expected, last = chunk_scan(x, dt, a, b, c, chunk)
    state, outputs = torch.zeros_like(last), []
    for t in range(SEQ):
        y, state = chunk_step(x[t], dt[t], a, b[t], c[t], state)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_bias", [True, False])
def test_convolution(with_bias: bool) -> None:
    x, weight = random(SEQ, BATCH, CHANNELS), random(CHANNELS, 1, 4)
    bias = random(CHANNELS) if with_bias else None
    whole = causal_convolution(x, weight, bias)
    before = torch.cat([torch.zeros(3, BATCH, CHANNELS), x])
    single = [causal_convolution(x[t : t + 1], weight, bias, before=before[t : t + 3]) for t in range(SEQ)]
    torch.testing.assert_close(torch.cat(single), whole, rtol=1e-5, atol=1e-5)
