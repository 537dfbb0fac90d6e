"""FP8 on fake CUDA: products, formats, layouts and scales of every recipe; compiled blocks are one graph."""

from collections import Counter
from typing import Any

import pytest

from tests.fake.checks import assert_layout, clean, compiled
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, HIDDEN, MICRO_BATCH, RECOMPUTE, SEQ, SP2, TP2, Case
from tests.fake.test_native import native
from tests.marks import with_more

FFN, TOKENS = 512, SEQ * MICRO_BATCH
FORWARD = "e4m3fn"
# Two blocks in FP8, between the first and the last, which stay in bf16.
DEEP, INNER = {"num_layers": 4}, 2


def linears(tensor: int) -> list[tuple[int, int]]:
    """(features out, in) of a block's linears on a tensor rank: QKV, output, gate and up, down."""
    width, inner = HIDDEN // tensor, FFN // tensor
    return [(3 * width, HIDDEN), (HIDDEN, width), (2 * inner, HIDDEN), (HIDDEN, inner)]


def derived(recipe: str, blocks: int, tensor: int = 1, wgrad: bool = True) -> Counter[tuple[Any, ...]]:
    """Products of a step: of each linear the output, which alone may sum fast, and both gradients."""
    gradient = "e4m3fn" if recipe in ("rowwise", "mxfp8") else "e5m2"
    products_seen: Counter[tuple[Any, ...]] = Counter()
    for out, inner in linears(tensor):
        products = [(TOKENS, out, inner, FORWARD, True), (TOKENS, inner, out, gradient, False)]
        if wgrad:
            products.append((out, inner, TOKENS, gradient, False))
        for rows, columns, summed, kind, fast in products:
            scales: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
            if recipe == "rowwise" and fast:
                scales = ((rows, 1), (1, columns))
            if recipe == "mxfp8":  # tiles of 128 x 4, flat
                scales = tuple((-(-lines // 128) * 128 * -(-summed // 128) * 4,) for lines in (rows, columns))  # type: ignore[assignment]
            fast_sums = fast and recipe != "mxfp8"
            products_seen[rows, columns, summed, kind, FORWARD, *scales, "bfloat16", fast_sums] += blocks
    return products_seen


def seen_products(report: dict[str, Any]) -> Counter[tuple[Any, ...]]:
    return Counter({tuple(tuple(x) if isinstance(x, list) else x for x in call): n for *call, n in report["scaled"]})


@pytest.mark.parametrize("recipe", with_more(["tensorwise", "rowwise", "mxfp8", "te"], "te", "rowwise"))
def test_products_of_inner_blocks(recipe: str, fake_cuda: FakeCuda) -> None:
    """Products of the first and the last block, of heads and of attention are bf16."""
    capability = (10, 0) if recipe == "mxfp8" else (9, 0)
    report = clean(fake_cuda, Case(values={**DEEP, "precision_fp8": recipe}, capability=capability))
    assert seen_products(report) == derived(recipe, INNER)
    baseline = fake_cuda.run(Case(values=DEEP))
    assert baseline["scaled"] == []
    # As many products as without FP8.
    assert _products(report) == _products(baseline)


def _products(report: dict[str, Any]) -> int:
    kernels = Counter(report["kernels"])
    return sum(kernels[name] for name in ("aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm", "aten.matmul"))


@pytest.mark.more
def test_keys_of_layers_and_of_weight_gradients(fake_cuda: FakeCuda) -> None:
    keys = {**DEEP, "precision_fp8": "tensorwise", "te_fp8_wgrad": False, "num_layers_at_start_in_bf16": 3}
    report = clean(fake_cuda, Case(values={**keys, "num_layers_at_end_in_bf16": 0}))
    assert seen_products(report) == derived("tensorwise", 1, wgrad=False)


@pytest.mark.parametrize("name", with_more(["tp2", "tp2 sp", "recompute"], product=["tp2", "recompute"]))
def test_layouts(name: str, fake_cuda: FakeCuda) -> None:
    """No communication comes with it: the collectives are those of bf16."""
    keys = {"tp2": TP2, "tp2 sp": SP2, "recompute": RECOMPUTE}[name]
    tensor = keys.get("model_parallel_size", 1)
    case = Case(tensor, tensor - 1, {**DEEP, **keys, "precision_fp8": "tensorwise"})
    assert_layout(fake_cuda, [case])
    expected, products = derived("tensorwise", INNER, tensor), seen_products(fake_cuda.run(case))
    if name == "recompute":
        assert products.keys() == expected.keys() and products.total() > expected.total()
    else:
        assert products == expected


COMPILED: dict[str, Case] = {
    "tensorwise": Case(values={**DEEP, **COMPILE, "precision_fp8": "tensorwise"}),
    "te": Case(values={**DEEP, **COMPILE, "precision_fp8": "te"}),
    "rowwise": Case(values={**DEEP, **COMPILE, "precision_fp8": "rowwise"}),
    "mxfp8": Case(values={**DEEP, **COMPILE, "precision_fp8": "mxfp8"}, capability=(10, 0)),
    "te, ZeRO 3": native(3, **DEEP, **COMPILE, precision_fp8="te"),
    "te, tp2 sp": Case(2, 1, {**DEEP, **COMPILE, **SP2, "precision_fp8": "te"}),
    "te, recompute": Case(values={**DEEP, **COMPILE, **RECOMPUTE, "precision_fp8": "te"}),
}


@pytest.mark.parametrize("name", with_more(COMPILED, "te, ZeRO 3", product=COMPILED.keys() - {"te, ZeRO 3"}))
def test_compiled_blocks_are_two_graphs(name: str, fake_cuda: FakeCuda) -> None:
    """bf16 blocks have one graph, FP8 blocks (scales are inputs) one, logits two (three over ranks)."""
    compiled(fake_cuda, COMPILED[name], graphs=5 if "tp2" in name else 4)
