"""Computes 64-bit checksums of the bits of tensors, on their device."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE = 2**20  # words of 8 bytes: temporary tensors stay in the cache of a large GPU
_FACTOR = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number; odd


@torch.no_grad()
def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a checksum of the bits of each tensor, int64 `[tensors]` on `device`.

    The sum depends on values and their order, not on the layout in memory. Each tensor is read once, and
    temporary tensors take 16 MiB.
    """
    salts: dict[torch.device, Tensor] = {}
    sums = [torch.zeros(0, dtype=torch.int64, device=device)]
    for tensor in tensors:
        if tensor.device not in salts:
            salts[tensor.device] = torch.arange(_PIECE, device=tensor.device).mul_(_FACTOR)
        sums.append(_checksum(tensor, salts[tensor.device]).to(device).view(1))
    return torch.cat(sums)


def _checksum(tensor: Tensor, salt: Tensor) -> Tensor:
    """Returns a tensor's checksum, int64 `[]`. salt: a number for each place in a piece.

    Each word of 8 bytes is mixed one-to-one with its place before the sum, so a change of one word always
    shows. Without the mix, exchanged values would not show; with a single round of it, pairs of flipped signs
    would cancel too often.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in tensor.detach().reshape(-1).view(torch.uint8).split(8 * _PIECE):
        if piece.storage_offset() % 8 or len(piece) % 8:
            piece = F.pad(piece, (0, -len(piece) % 8)).clone()
        mixed = piece.view(torch.int64) ^ salt[: len(piece) // 8]
        low, high = mixed.view(torch.int32).view(-1, 2).unbind(1)
        for _ in range(2):  # products carry low bits to high ones; then high bits change low ones
            mixed *= _FACTOR
            low ^= high
        total = total * _FACTOR + mixed.sum()
    return total
