"""Checksums of weights: any flipped bit or exchanged value shows, wherever the tensor lies in memory."""

from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from megatron.training import checksums as module
from megatron.training.checksums import checksums


def checksum(tensor: Tensor) -> int:
    return int(checksums([tensor], torch.device("cpu"))[0])


def with_flipped_bit(tensor: Tensor, bit: int) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_flipped_bit_and_every_exchange_shows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with signs alone, with equal numbers of opposite sign, and across pieces of the tensor."""
    monkeypatch.setattr(module, "_PIECE", 3)
    values = torch.randn(11, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[5], values[9] = -values[1], -values[2]
    bits = 8 * values.nbytes
    variants = [values, *(with_flipped_bit(values, bit) for bit in range(bits))]
    sign_bits = range(8 * values.itemsize - 1, bits, 8 * values.itemsize)
    for pair in combinations(range(len(values)), 2):
        exchanged = values.clone()
        exchanged[list(pair)] = exchanged[list(reversed(pair))]
        signs_flipped = with_flipped_bit(with_flipped_bit(values, sign_bits[pair[0]]), sign_bits[pair[1]])
        variants += [exchanged] if values[pair[0]] == -values[pair[1]] else [exchanged, signs_flipped]
    assert len({checksum(variant) for variant in variants}) == len(variants)


def test_equal_bits_give_equal_sums_in_any_memory() -> None:
    """As a view of a buffer that is not aligned to words, transposed, or a scalar; NaN counts by its bits."""
    values = torch.tensor([[1.0, float("nan"), 3.0], [4.0, 5.0, -0.0]], dtype=torch.bfloat16)
    buffer = torch.cat([torch.zeros(1, dtype=torch.bfloat16), values.view(-1)])
    assert buffer[1:].storage_offset() * 2 % 8
    assert checksum(values) == checksum(buffer[1:].view(2, 3)) == checksum(values.t().contiguous().t())
    assert checksum(values) != checksum(values.abs())
    assert checksum(torch.tensor(1.5)) == checksum(torch.tensor([1.5])) != checksum(torch.tensor(-1.5))


def test_the_sum_does_not_depend_on_other_tensors() -> None:
    tensors = [torch.randn(n) for n in (5, 1, 64)]
    assert checksums(tensors, torch.device("cpu")).tolist() == [checksum(tensor) for tensor in tensors]
    assert checksums([], torch.device("cpu")).shape == (0,)


def test_flips_of_the_same_bit_do_not_cancel() -> None:
    """In both or all four words of a tensor, for every bit, also the highest, which products confuse."""
    generator = torch.Generator().manual_seed(1)
    for bit, words in product(range(64), (2, 4)):
        tensors = torch.randint(-(2**63), 2**63 - 1, (40, words), generator=generator)
        flipped = tensors ^ (-(2**63) if bit == 63 else 1 << bit)
        sums = checksums([*tensors, *flipped], torch.device("cpu")).view(2, 40)
        assert (sums[0] != sums[1]).all(), (bit, words)


def test_negated_tensors_differ() -> None:
    values = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    sums = checksums([*values, *-values, *values.flip(1)], torch.device("cpu"))
    assert len(sums.unique()) == 900
