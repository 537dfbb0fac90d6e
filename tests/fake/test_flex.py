"""FlexAttention in compiled blocks or by itself: no boundary compiles anew, no tensor is seq x seq."""

from typing import Any

import pytest

from tests.fake.checks import assert_layout, clean, compiled
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, GQA, LAYERS, PACKED, PACKED_DPO, RECOMPUTE, SHARED, SP2, WINDOW, Case
from tests.marks import with_more

FLEX: dict[str, Any] = {"attention_backend": "flex"}
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 30.0}  # flex is what `auto` takes
SINKS: dict[str, Any] = {"attention_sinks": True}  # and here
DOCUMENTS = [[[0, 50], [0, 20, 100]], [[0], [0]], [[0, 10, 70], [0, 20, 30]], [list(range(0, 192, 12)), [0, 1]]]
CASES: dict[str, Case] = {
    "documents": Case(values={**FLEX, **PACKED, **GQA, **COMPILE}, documents=DOCUMENTS),
    "documents, by itself": Case(values={**FLEX, **PACKED, **GQA}, documents=DOCUMENTS),
    "windows": Case(values={**FLEX, **WINDOW, **COMPILE}), "rows, by itself": Case(values=FLEX),
    "capped logits": Case(values={**CAPPED, **PACKED, **COMPILE}, documents=DOCUMENTS),
    "capped rows, by itself": Case(values=CAPPED),
    "sinks": Case(values={**SINKS, **PACKED, **GQA, **COMPILE}, documents=DOCUMENTS),
    "sinks, by itself": Case(values=SINKS), "shared prompts": Case(values={**PACKED_DPO, **COMPILE}, **SHARED),
    "shared prompts, by itself": Case(values=PACKED_DPO, **SHARED),
    "shared prompts, recomputed": Case(values={**PACKED_DPO, **COMPILE, **RECOMPUTE}, **SHARED),
}  # fmt: skip


@pytest.mark.parametrize("name", with_more(CASES, "documents", product=CASES.keys() - {"documents"}))
def test_blocks_of_flex_attention(name: str, fake_cuda: FakeCuda) -> None:
    case = CASES[name]
    report = (compiled if "compile" in case.values else clean)(fake_cuda, case)
    calls = LAYERS * max(1, len(case.documents))
    num_forwards = 2 if "recompute" in name else 1
    assert report["kernels"]["flex_attention"] == num_forwards * calls
    assert report["kernels"]["flex_attention_backward"] == calls and not report["varlen"]


@pytest.mark.product
def test_sequence_parallel_ranks(fake_cuda: FakeCuda) -> None:
    assert_layout(fake_cuda, [Case(2, rank, {**FLEX, **SP2, **COMPILE}) for rank in range(2)])
