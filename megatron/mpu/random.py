"""Seeds of dropout: a pure function of (batch seed, layer, place, rank), so that recomputation and resume repeat them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


def mix_seed(*parts: int | str) -> int:
    """One 63-bit seed from several numbers or words."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def fork_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Run with torch's generators seeded by `seed`; their state is as before afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def dropout(x: Tensor, p: float, seed: int, training: bool) -> Tensor:
    """Dropout whose mask is a function of `seed` alone; the identity for p = 0 or in evaluation."""
    if p == 0.0 or not training:
        return x
    with fork_seed(seed, x.device):
        return F.dropout(x, p)
