"""Derives dropout seeds, and applies dropout with an explicit seed.

A seed is a function of fixed numbers only (batch seed, layer, place in the layer, rank). So recomputation and
a resumed run draw the same dropout masks.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def mix_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed: a hash of all given numbers and strings."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def fork_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators with `seed` inside the context, and restores their earlier state after it."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed is slower: it seeds every visible device, and inspects the stack for absent device
        # types.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def seed_tensor(seed: int) -> Tensor:
    """Returns `seed` as an int64 scalar tensor on the CPU.

    Compiled code then runs with any seed. A Python int would make `torch.compile` recompile for each new
    value.
    """
    return torch.tensor(seed % 2**63, dtype=torch.int64, device="cpu")


def dropout(x: Tensor, p: float, seed: Tensor, training: bool) -> Tensor:
    """Applies dropout with probability `p` to `x`. The mask depends only on `seed`, a tensor from
    `seed_tensor`.

    Returns `x` itself if p is 0 or `training` is False.
    """
    if p == 0.0 or not training:
        return x
    if torch.compiler.is_compiling():
        return _seeded_dropout(x, p, seed)[0]
    with fork_seed(int(seed), x.device):
        return F.dropout(x, p)


# A custom operator shows the compiler only shapes. So the compiler cannot change the random numbers, and the
# graph does not break. Used in compiled code only, because dispatching it takes 0.2 ms.
@torch.library.custom_op("megatron::seeded_dropout", mutates_args=())
def _seeded_dropout(x: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `x` after `F.dropout` with this seed, and the factors by which backward multiplies the
    gradient.

    On GPUs the factors are the boolean mask, which backward also scales by 1 / (1 - p). On CPUs they are mask
    / (1 - p).
    """
    with fork_seed(int(seed), x.device):
        if x.is_cuda:
            return torch.native_dropout(x, p, True)
        factors = torch.empty_like(x).bernoulli_(1.0 - p).div_(1.0 - p)
    return x * factors, factors


@_seeded_dropout.register_fake
def _shapes(x: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool if x.is_cuda else x.dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:
    (mask,) = ctx.saved_tensors
    if mask.dtype == torch.bool:
        return torch.ops.aten.native_dropout_backward(gradient, mask, 1.0 / (1.0 - ctx.p)), None, None
    return gradient * mask, None, None


_seeded_dropout.register_autograd(_gradient, setup_context=_keep)
