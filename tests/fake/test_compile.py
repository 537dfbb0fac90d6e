"""Compiled blocks: one graph without breaks for all of a kind and every step; the same collectives."""

from typing import Any

import pytest

from tests.fake.checks import assert_documents, assert_layout, clean, compiled
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, DROPOUT, LAYERS, PACKED, PACKED_DPO, RECOMPUTE, SHARED, SP2, TP2, WINDOW, Case
from tests.marks import with_more

# Of all blocks, and of what is done to a chunk of logits: before ranks tell each other, to rows, to it.
GRAPHS = {1: 3, 2: 4}
# Of one to many documents; the longest are of several lengths.
DOCUMENTS = [[[0, 50], [0, 20, 100]], [[0], [0]], [[0, 10, 70], [0, 20, 30]], [list(range(0, 192, 12)), [0, 1]]]
STEPS = [[list(range(0, 192, 192 // (1 + step))), [0, 9 * step + 1]] for step in range(0, 20, 4)]
CASES: dict[str, Case] = {
    "one": Case(values=COMPILE),
    "tp2": Case(2, 1, {**COMPILE, **TP2}),
    "tp2 sp": Case(2, 1, {**COMPILE, **SP2}),
    "window": Case(values={**COMPILE, **WINDOW}),
    "window fp32": Case(values={**COMPILE, **WINDOW, "precision": "fp32"}),
    "packed window dropout": Case(values={**COMPILE, **PACKED, **WINDOW, **DROPOUT}, documents=DOCUMENTS),
    "recompute": Case(values={**COMPILE, **RECOMPUTE}),
    "dropout": Case(values={**COMPILE, **DROPOUT}),
    "packed dropout": Case(values={**COMPILE, **PACKED, **DROPOUT}, documents=DOCUMENTS),
}


@pytest.mark.parametrize("name", with_more(CASES, "tp2 sp", product=CASES.keys() - {"tp2 sp"}))
def test_one_graph(name: str, fake_cuda: FakeCuda) -> None:
    case = CASES[name]
    assert_layout(fake_cuda, [case])
    report = compiled(fake_cuda, case, GRAPHS[case.world])
    if case.world > 1:  # else the steps that were counted ran eagerly
        assert report["kernels"]["_c10d_functional.wait_tensor"] > 0


@pytest.mark.product
@pytest.mark.parametrize("name", ["one", "tp2", "tp2 sp"])
def test_validation_amid_packed_steps(name: str, fake_cuda: FakeCuda) -> None:
    """However documents lie, and although every batch is validated after its step: the first step's graph."""
    layout: dict[str, Any] = {"one": {}, "tp2": TP2, "tp2 sp": SP2}[name]
    case = Case(2 if layout else 1, 0, {**COMPILE, **PACKED, **layout}, STEPS, validates=True)
    compiled(fake_cuda, case, GRAPHS[case.world])
    assert_documents(fake_cuda, case)


@pytest.mark.more
def test_prompts_that_pairs_share_may_change(fake_cuda: FakeCuda) -> None:
    # Before the first step FlexAttention was tried by itself; blocks, logits forwards, logits backwards.
    compiled(fake_cuda, Case(values={**COMPILE, **PACKED_DPO}, **SHARED), 4)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.product)], ids=["eager", "compiled"])
def test_recomputed_kernels(eager: bool, fake_cuda: FakeCuda) -> None:
    """Attention of each block, of every other, or selectively none and no product; kept bytes lie between."""
    selective = {"checkpoint_activations": True, "recompute_granularity": "selective"}
    forms = {"none": {}, "selective": selective, "half": {**RECOMPUTE, "recompute_every": 2}, "full": RECOMPUTE}
    cases = {name: Case(values={**({} if eager else COMPILE), **values}) for name, values in forms.items()}
    reports = {name: clean(fake_cuda, case) for name, case in cases.items()}
    counts = {name: report["kernels"]["aten._scaled_dot_product_cudnn_attention"] for name, report in reports.items()}
    assert counts == {"none": LAYERS, "selective": LAYERS, "half": 3 * LAYERS // 2, "full": 2 * LAYERS}
    products = {name: report["kernels"]["aten.mm"] for name, report in reports.items()}
    assert products["selective"] == products["none"] < products["half"] < products["full"]
    peaks = [reports[name]["passes"] for name in ("full", "half", "none")]
    assert peaks == sorted(peaks) and peaks[0] < reports["selective"]["passes"] < peaks[-1]
