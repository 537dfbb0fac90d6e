"""Each mistake, put in alone, is seen by a check, which says what is wrong."""

import pytest

from tests.fake.checks import assert_clean, assert_construction, assert_documents, assert_layout
from tests.fake.client import FakeCuda
from tests.fake.layouts import PACKED, TP2, Case

PACKED_ROWS = {"values": PACKED, "documents": [[[0, 100], [0]]]}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(mistake="tensor on the cpu"), r"a result on the CPU, \[256\]: aten.ones at model/stage.py"),
        (Case(mistake="item in the loss"), "the host waits for a value .*: aten._local_scalar_dense at model/stage.py"),
        (Case(**PACKED_ROWS, mistake="int64 cu_seqlens"), "cu_seqlens are torch.int64, the kernel reads int32"),
        (Case(**PACKED_ROWS, mistake="mask of seq x seq"), "a tensor of seq x seq, .* at model/attention/masks.py"),
    ],
    ids=lambda value: value.mistake if isinstance(value, Case) else "",
)
def test_in_a_step(case: Case, message: str, fake_cuda: FakeCuda) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_clean(fake_cuda.run(case))


@pytest.mark.parametrize("mistake", ["swapped groups", "skipped collective"])
def test_in_collectives(mistake: str, fake_cuda: FakeCuda) -> None:
    with pytest.raises(AssertionError, match="rank 1"):
        assert_layout(fake_cuda, [Case(4, 1, TP2, mistake=mistake)])


def test_at_construction(fake_cuda: FakeCuda) -> None:
    with pytest.raises(AssertionError, match="construction"):
        assert_construction(fake_cuda.run(Case(mistake="whole stage at construction")))


def test_in_documents(fake_cuda: FakeCuda) -> None:
    case = Case(**PACKED_ROWS, mistake="documents by tokens")
    with pytest.raises(AssertionError, match="384 documents for 3"):
        assert_documents(fake_cuda.run(case), case)
