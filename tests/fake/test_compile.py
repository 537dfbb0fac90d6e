"""Compiled blocks: one graph for all of them, without breaks, in which the same collectives run, and which
serves for every step."""

from typing import Any

import pytest

from tests.fake.checks import assert_clean, assert_documents, assert_layout
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, DROPOUT, PACKED, RECOMPUTE, SP2, TP2, WINDOW, Case
from tests.marks import with_more

ONE_GRAPH = {"graphs": 1, "breaks": 0}
# Of one to many documents; the longest are of several lengths.
DOCUMENTS = [[[0, 50], [0, 20, 100]], [[0], [0]], [[0, 10, 70], [0, 20, 30]], [list(range(0, 192, 12)), [0, 1]]]
CASES: dict[str, Case] = {
    "one": Case(values=COMPILE),
    "tp2": Case(2, 1, {**COMPILE, **TP2}),
    "tp2 sp": Case(2, 1, {**COMPILE, **SP2}),
    "window": Case(values={**COMPILE, **WINDOW}),
    "recompute": Case(values={**COMPILE, **RECOMPUTE}),
    "dropout of hidden states": Case(values={**COMPILE, "hidden_dropout": 0.1}),
}


@pytest.mark.parametrize("name", with_more(CASES, "one", "tp2", "window", "recompute"))
def test_one_graph(name: str, fake_cuda: FakeCuda) -> None:
    case = CASES[name]
    assert_layout(fake_cuda, [case])
    seen = fake_cuda.run(case)
    assert seen["compiled"] == seen["compiled again"] == ONE_GRAPH
    if case.world > 1:  # else the steps that were counted ran eagerly
        assert seen["kernels"]["_c10d_functional.wait_tensor"] > 0


def test_document_boundaries_may_change(fake_cuda: FakeCuda) -> None:
    values: dict[str, Any] = {**COMPILE, **PACKED}
    case = Case(values=values, documents=DOCUMENTS)
    seen = fake_cuda.run(case)
    assert_clean(seen)
    assert_documents(seen, case)
    assert seen["compiled"] == seen["compiled again"] == ONE_GRAPH


def test_dropout_of_attention_breaks_graphs(fake_cuda: FakeCuda) -> None:
    """Its mask is drawn within torch's own attention, which no operator of ours can wrap: a block is cut
    before and after it, once for its forward and as often for what the compiler resumes in."""
    seen = fake_cuda.run(Case(values={**COMPILE, **DROPOUT}))
    assert_clean(seen)
    assert seen["compiled"] == seen["compiled again"] == {"graphs": 6, "breaks": 6}
