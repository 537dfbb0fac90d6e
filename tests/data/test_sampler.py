"""Which sample goes where."""

import itertools

import pytest

from megatron.data.sampler import eval_slices, rank_slice, train_slices
from tests.data.samples import golden_json


def test_shares_equal_neox_batch_sampler():
    for case, golden in golden_json("batch_sampler.json").items():
        n, batch, size, start, rank = (int(part.split("=")[1]) for part in case.split("|"))
        for begin, expected in ((start, golden["first_pass"]), (0, golden["second_pass"])):
            slices = train_slices(n, batch, 1, rank, size, consumed_samples=begin * batch)
            assert [list(samples) for samples in slices] == expected, case


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (2, 1), (8, 1), (1, 2), (4, 2), (2, 4), (1, 8)])
def test_samples_of_a_step_do_not_depend_on_layout(micro: int, size: int):
    batch, accumulation = 8, 8 // (micro * size)
    ranks = [list(train_slices(50, batch, accumulation, rank, size, 16)) for rank in range(size)]
    assert {len(slices) for slices in ranks} == {4 * accumulation}
    for step in range(4):
        taken = [slices[step * accumulation : (step + 1) * accumulation] for slices in ranks]
        assert all(len(samples) == micro for slices in taken for samples in slices)
        together = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(taken)))
        assert together == list(range(16 + 8 * step, 24 + 8 * step))


def test_going_on_costs_nothing_however_far():
    slices = train_slices(10**15, 1024, 4, 3, 8, consumed_samples=10**14)
    assert next(slices) == rank_slice(10**14, 256, 3, 8)


@pytest.mark.parametrize(("n", "micro", "size"), [(5, 4, 2), (5, 1, 8), (16, 2, 4), (0, 2, 2), (17, 2, 4)])
def test_evaluation_takes_every_sample_once_on_equal_ranks(n: int, micro: int, size: int):
    ranks = [list(eval_slices(n, micro, rank, size)) for rank in range(size)]
    assert len({len(slices) for slices in ranks}) == 1
    assert all(len(samples) == micro for slices in ranks for samples in slices)
    taken = [index for slices in ranks for samples in slices for index in samples]
    assert sorted(index for index in taken if index < n) == list(range(n))
    assert len(taken) - n < micro * size
