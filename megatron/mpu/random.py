"""Seeds of dropout: pure functions of batch seed, layer, position and rank, so that recomputation and a
resumed run repeat the same masks."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def mix_seed(*parts: int | str) -> int:
    """One 63-bit seed, a hash of several numbers or words."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def fork_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators with `seed` within the context; afterwards they have their earlier state
    again."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would seed every device in sight, and walk the stack for each kind that is not
        # there.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


# A compiled graph would draw other numbers, and be compiled again for every seed. This is
# torch.compiler.disable, but for the import of the compiler, seconds of every start, which waits for the
# first call.
@torch._disable_dynamo
def seeded(function: Callable[[], Tensor], seed: int, device: torch.device) -> Tensor:
    """`function()` with its random numbers from `seed` alone."""
    with fork_seed(seed, device):
        return function()


def dropout(x: Tensor, p: float, seed: int, training: bool) -> Tensor:
    """Dropout whose mask is a function of `seed` alone; the identity for p = 0 or in evaluation."""
    if p == 0.0 or not training:
        return x
    return seeded(partial(F.dropout, x, p), seed, x.device)
