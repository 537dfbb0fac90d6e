"""Every layout, forwards and backwards, on fake CUDA: devices of tensors, collectives, bytes."""

import random
from collections import Counter
from typing import Any

import pytest

from tests.fake.checks import assert_construction, assert_documents, assert_layout, clean, derived
from tests.fake.client import FakeCuda
from tests.fake.layouts import (
    BIG,
    COMPILE,
    DPO,
    DROPOUT,
    GQA,
    HIDDEN,
    LAYERS,
    MICRO_BATCH,
    PACKED,
    PACKED_DPO,
    PAIRS,
    PP2,
    RECOMPUTE,
    SEQ,
    SHARED,
    SP2,
    TP2,
    VOCAB,
    WINDOW,
    Case,
)  # fmt: skip
from tests.marks import with_more

TWO_DOCUMENTS = [[[0, 100], [0]], [[0, 7, 50], [0, 150]]]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "tp2": (2, TP2), "tp2 sp": (2, SP2), "pp2": (2, PP2), "dp2": (2, {}),
    "tp2 pp2 dp2 sp": (8, {**SP2, **PP2}), "tp2 recompute": (2, {**TP2, **RECOMPUTE}),
    "tp2 sp recompute": (2, {**SP2, **RECOMPUTE}), "tp2 gqa": (2, {**TP2, **GQA}), "tp2 window": (2, {**TP2, **WINDOW}),
    "tp2 sp dropout": (2, {**SP2, **DROPOUT}), "tp2 preferences": (2, {**TP2, **DPO}),
}  # fmt: skip
BIG_WORLD = 1024  # tp8 pp4 dp32


@pytest.mark.parametrize("name", with_more(LAYOUTS, "tp2 pp2 dp2 sp", product=["tp2 gqa", "tp2 recompute"]))
def test_collectives(name: str, fake_cuda: FakeCuda) -> None:
    world, values = LAYOUTS[name]
    ranks = {"tp2": (0, 1), "tp2 sp": (0, 1), "pp2": (0, 1), "tp2 pp2 dp2 sp": (0, 3, 5, 6)}.get(name, (world - 1,))
    assert_layout(fake_cuda, [Case(world, rank, values, pairs="train_impl" in values) for rank in ranks])


def big_ranks() -> list[int]:
    """The first, the last, one in the middle and two more; each with its neighbour in the tensor group."""
    chosen = [0, BIG_WORLD - 1, BIG_WORLD // 2, *random.Random(18).sample(range(BIG_WORLD), 2)]
    return sorted({rank for chosen_rank in chosen for rank in (chosen_rank, chosen_rank ^ 1)})


@pytest.mark.parametrize("ranks", [(0, 1023), pytest.param(big_ranks(), marks=pytest.mark.product)])
def test_ranks_of_a_thousand(ranks: list[int], fake_cuda: FakeCuda) -> None:
    assert_layout(fake_cuda, [Case(BIG_WORLD, rank, BIG) for rank in ranks])


def test_attention_kernels(fake_cuda: FakeCuda) -> None:
    """Whole rows run on one fused kernel a layer; windows on the varlen one, without masks."""
    causal, windows = clean(fake_cuda, Case()), clean(fake_cuda, Case(values=WINDOW))
    assert causal["kernels"]["aten._scaled_dot_product_cudnn_attention_backward"] == LAYERS
    assert windows["kernels"]["torch_attn._varlen_attn_backward"] == LAYERS
    assert {(call["documents"], call["longest"]) for call in windows["varlen"]} == {(MICRO_BATCH, SEQ)}


@pytest.mark.parametrize(
    ("values", "kernel"),
    [({}, "torch_attn._varlen_attn"), (GQA, "torch_attn._varlen_attn"), (DROPOUT, "aten._efficient_attention_forward")],
    ids=["plain", "gqa", "dropout"],
)
def test_documents(values: dict[str, Any], kernel: str, fake_cuda: FakeCuda) -> None:
    case = Case(values={**PACKED, **values}, documents=TWO_DOCUMENTS)
    assert clean(fake_cuda, case)["kernels"][kernel] == LAYERS * len(TWO_DOCUMENTS)
    assert_documents(fake_cuda, case)


def test_peak_bytes(fake_cuda: FakeCuda) -> None:
    """Recomputation keeps blocks' inputs and one's insides; sequence parallelism parts between linears."""
    baseline, recomputed = (fake_cuda.run(Case(values={"num_layers": 4, **keys})) for keys in ({}, RECOMPUTE))
    hidden = 2 * SEQ * MICRO_BATCH * HIDDEN
    weights_and_gradients = 2 * baseline["parameters"]
    block_bytes = (baseline["passes"] - weights_and_gradients) / 4
    assert recomputed["passes"] <= weights_and_gradients + 4 * hidden + 2 * block_bytes
    tensor_parallel, sequence_parallel = fake_cuda.run(Case(2, 1, TP2)), fake_cuda.run(Case(2, 1, SP2))
    # Of each block at least both inputs of the norms and both sums, [seq, batch, hidden] in bf16.
    assert sequence_parallel["passes"] <= tensor_parallel["passes"] - LAYERS * 4 * hidden / 2


@pytest.mark.parametrize("values", [{}, TP2], ids=["one", "tp2"])
def test_construction(values: dict[str, Any], fake_cuda: FakeCuda) -> None:
    assert_construction(fake_cuda, Case(values.get("model_parallel_size", 1), values=values))


@pytest.mark.parametrize(("values", "kernel"), [
    ({}, "flex_attention"),
    ({"attention_dropout": 0.1, "disable_dropout": False, "prefix_sharing": True},
     "aten._efficient_attention_forward"),  # written out
], ids=["flex", "dropout"])  # fmt: skip
def test_prompts_that_pairs_share(values: dict[str, Any], kernel: str, fake_cuda: FakeCuda) -> None:
    case = Case(2, 1, {**TP2, **PACKED_DPO, **values}, **SHARED)
    assert_layout(fake_cuda, [case])
    assert fake_cuda.run(case)["kernels"][kernel] == LAYERS * len(PAIRS)


def test_scoring_and_generation(fake_cuda: FakeCuda) -> None:
    """After a step, log-probabilities of its rows, then their tokens into a cache and one token more."""
    case = Case(2, 1, TP2, inference=True)
    report = clean(fake_cuda, case)
    hidden, forward = 2 * SEQ * MICRO_BATCH * HIDDEN, 2 * LAYERS + 1
    extra_collectives = Counter(
        {(0, 1, 2, "all_reduce", hidden): 2 * forward}
    )  # the rows scored, and read into the cache
    extra_collectives[0, 1, 2, "all_reduce", 2 * MICRO_BATCH * HIDDEN] = forward  # one token a row
    extra_collectives[0, 1, 2, "all_gather", 2 * 3 * 4 * SEQ * MICRO_BATCH] = 1  # cross-entropy, as in training
    extra_collectives[0, 1, 2, "all_gather", 2 * MICRO_BATCH * VOCAB] = 2  # the last logits of each row, bf16
    assert Counter(map(tuple, report["collectives"])) == derived(case) + extra_collectives


@pytest.mark.parametrize("overrides", [{}, pytest.param(COMPILE, marks=pytest.mark.product)], ids=["eager", "compiled"])
def test_async_tensor_parallel(overrides: dict[str, Any], fake_cuda: FakeCuda) -> None:
    """Linears gather with one product and scatter with another, columns gather again; no more differs."""
    values = {**SP2, **overrides, "async_tensor_parallel": True}
    report, expected = clean(fake_cuda, Case(2, 1, values)), derived(Case(2, 1, SP2))
    hidden = 2 * SEQ * MICRO_BATCH * HIDDEN
    for kind in ("all_gather", "reduce_scatter"):
        expected[0, 1, 2, kind, hidden] -= 4 * LAYERS
    assert Counter(map(tuple, report["collectives"])) == expected
    for kernel in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        assert report["kernels"][f"symm_mem.{kernel}"] == 4 * LAYERS
