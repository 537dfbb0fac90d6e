"""Samples of each rank and step; over layouts: test_loader.py."""

from megatron.data.loader import rank_slice, train_slices
from tests.data.samples import golden_json


def test_shares_equal_neox_batch_sampler():
    for case, golden in golden_json("batch_sampler.json").items():
        n, batch, size, start, rank = (int(part.split("=")[1]) for part in case.split("|"))
        for begin, expected in ((start, golden["first_pass"]), (0, golden["second_pass"])):
            slices = train_slices(n, batch, 1, rank, size, consumed_samples=begin * batch)
            assert [list(samples) for samples in slices] == expected, case


def test_going_on_costs_nothing_however_far():
    slices = train_slices(10**15, 1024, 4, 3, 8, consumed_samples=10**14)
    assert next(slices) == rank_slice(10**14, 256, 3, 8)
