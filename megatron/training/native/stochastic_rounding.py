"""Rounds fp32 to bf16 stochastically: up or down at random, so that the mean stays the same.

A value's random bits depend only on seed, parameter, step and the value's position in the parameter. So they
are the same in a resumed run, on other data ranks and in other ZeRO stages.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


class Stream(NamedTuple):
    """Identifies the random bits of one rank's elements of a parameter.

    number: from `stream_number`, below 2^63. start: index of the rank's first element in the parameter.
    """

    number: int
    start: int


def stream_number(*parts: int | str) -> int:
    """Returns a number for `parts`, such as a seed and the name of a parameter, equal in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _mix(x: Tensor) -> Tensor:
    """Mixes 32 bits one-to-one, so that each output bit depends on all input bits. x: int64 below 2^32.

    This is the finalizer "lowbias32" (Chris Wellons, https://nullprogram.com/blog/2018/07/31).
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def step_keys(streams: Tensor, steps: Tensor) -> Tensor:
    """Returns two keys for each parameter, from which `noise` makes a step's random bits.

    Keys are `[parameters, 2]` int64 below 2^32. streams: `Stream.number` of each parameter, steps: its step
    number, both `[parameters]` int64.
    """
    low_key = _mix((streams & _WORD) ^ _mix(steps))
    return torch.stack([low_key, _mix((streams >> 32) ^ low_key)], dim=1)


def noise(keys: Tensor, start: int, size: int) -> Tensor:
    """Returns 32 random bits for each of the elements `start` to `start + size - 1`: `[size]` int64.

    keys: `[2]`, a row of `step_keys`.
    """
    element = torch.arange(start, start + size, device=keys.device)
    return _mix(_mix((element & _WORD) ^ keys[0]) ^ (element >> 32) ^ keys[1])


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 values to bf16 stochastically. bits: uniform random integers below 2^16, of the same
    shape."""
    sums = values.contiguous().view(torch.int32) + bits.to(torch.int32)
    return (sums & -0x10000).view(torch.float32).bfloat16()
