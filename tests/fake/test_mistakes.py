"""Each mistake, put in alone, is seen by a check, which says what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fake.checks import assert_construction, assert_documents, assert_layout, clean
from tests.fake.client import FakeCuda
from tests.fake.layouts import PACKED, TP2, Case

PACKED_ROWS: dict[str, Any] = {"values": PACKED, "documents": [[[0, 100], [0]]]}
RANK: dict[str, Any] = {"world": 4, "rank": 1, "values": TP2}
MISTAKES: dict[str, tuple[dict[str, Any], Callable[[FakeCuda, Case], Any], str]] = {
    "tensor on the cpu": ({}, clean, r"CPU, \[256\]: aten.ones at model/stage"),
    "item in the loss": ({}, clean, "waits .*_local_scalar_dense at model/stage"),
    "int64 cu_seqlens": (PACKED_ROWS, clean, "cu_seqlens .*int64"),
    "mask of seq x seq": (PACKED_ROWS, clean, "seq x seq, .* at model/attention/masks"),
    "swapped groups": (RANK, lambda fake, case: assert_layout(fake, [case]), "rank 1"),
    "skipped collective": (RANK, lambda fake, case: assert_layout(fake, [case]), "rank 1"),
    "whole stage at construction": ({}, assert_construction, "construction"),
    "documents by tokens": (PACKED_ROWS, assert_documents, "384 documents for 3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_seen(mistake: str, fake_cuda: FakeCuda) -> None:
    keys, check, facts = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=facts):
        check(fake_cuda, Case(**keys, mistake=mistake))
