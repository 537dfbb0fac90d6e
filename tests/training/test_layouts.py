"""Every layout trains like one process, on both engines if DeepSpeed has it."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.training import runs
from tests.training.layout_runs import zero
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, SGD, Curve, assert_alike, config, curves_of

TP2, PP2, SP = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}, {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}), "dp4": (4, {}), "tp2": (2, TP2), "tp2+sp": (2, TP2 | SP), "pp2": (2, PP2),
    "pp4": (4, {"pipe_parallel_size": 4}), "tp2 x pp2": (4, TP2 | PP2), "tp2 x pp2 +sp": (4, TP2 | PP2 | SP),
    "dp2 x tp2": (4, TP2), "dp2 x pp2": (4, PP2),
    **{f"dp{ranks} zero{stage}": (ranks, zero(stage)) for ranks in (2, 4) for stage in (1, 2, 3)},
    **{f"dp2 x tp2 zero{stage}": (4, TP2 | zero(stage)) for stage in (1, 2)},
    "dp2 x tp2 +sp zero3": (4, TP2 | SP | zero(3)),
    **{f"dp2 x pp2 zero{stage}": (4, PP2 | zero(stage)) for stage in (1, 2, 3)},
}  # fmt: skip
NATIVE_ONLY = ("dp2 x pp2 zero2", "dp2 x pp2 zero3")
ENGINES = {name: ("native",) if name in NATIVE_ONLY else ("native", "deepspeed") for name in LAYOUTS}
LAYOUTS["dp4 zero3 by twos"] = (4, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
ENGINES["dp4 zero3 by twos"] = ("native",)
ROWS = [
    "tp2, native", "dp2 zero1, native", "dp2 zero3, native", "pp2, native", "dp2 x pp2 zero3, native",
    "dp2 zero3, deepspeed",
]  # fmt: skip
MORE_ROWS = ["dp2 x tp2 +sp zero3, native", "tp2 x pp2 +sp, native", "pp4, native", "tp2 x pp2 +sp, deepspeed"]
ALL_ROWS = [f"{name}, {engine}" for name in LAYOUTS for engine in ENGINES[name]]
MODELS, OPTIMIZERS = {"neox": NEOX, "llama": LLAMA, "rpe": RPE}, {"sgd": SGD, "adamw": ADAMW}
STEPS = 6
# Micro-batch size, model, optimizer, tied. Every layout meets every size and model, both optimizers, tied and
# untied; tests/soak/test_layout_table.py runs all 36 in every layout.
CELLS = [(1, "neox", "sgd", False), (4, "llama", "adamw", False), (2, "rpe", "adamw", True)]
MORE_CELLS = [(1, "llama", "adamw", True), (2, "neox", "adamw", True)]
MORE_CELLS += [(2, "llama", "sgd", False), (4, "neox", "sgd", True)]
Key = tuple[str, str, bool]


def cell_config(model: str, optimizer: str, tied: bool, micro_batch: int, layout: dict[str, Any]) -> dict[str, Any]:
    cell_keys = {"no_weight_tying": not tied, "train_micro_batch_size_per_gpu": micro_batch}
    return config(MODELS[model], OPTIMIZERS[optimizer], layout, cell_keys)


@pytest.fixture(scope="module")
def reference() -> Callable[[Key], Curve]:
    """One process, one micro-batch of 8."""

    @cache
    def reference_curve(key: Key) -> Curve:
        curve = curves_of({key: cell_config(*key, 8, {})}, STEPS)[key]
        assert key[1] == "sgd" or min(curve.norms) > ADAMW["gradient_clipping"], "the clip must bite"
        assert curve.losses[-1] < curve.losses[0] - 0.05, "the model must learn, or equality says little"
        return curve

    return reference_curve


PRODUCT = [(row, CELLS) for row in ALL_ROWS if row not in ROWS + MORE_ROWS]
PRODUCT += [(row, MORE_CELLS) for row in ("tp2, native", "pp2, deepspeed", "dp2 zero3, native")]


@pytest.mark.parametrize(("row", "cells"), runs.cells(product(ROWS, [CELLS]), product(MORE_ROWS, [CELLS]), PRODUCT))
def test_layout_equals_one_process(row: str, cells: list[Any], reference: Callable[[Key], Curve]) -> None:
    name, engine = row.rsplit(", ", 1)
    ranks, layout = LAYOUTS[name]
    largest_micro_batch = 2 if name.startswith("dp4") else 4  # of a step's 8 samples
    configs = {
        tuple(key): cell_config(*key, min(micro, largest_micro_batch), {**layout, "engine": engine})
        for micro, *key in cells
    }
    assert_alike(curves_of(configs, STEPS, ranks), {key: reference(key) for key in configs})


@pytest.mark.more
def test_stages_of_a_list_equal_one_process(reference: Callable[[Key], Curve]) -> None:
    """Embedding and output layer alone, tied; blocks unevenly."""
    key = ("neox", "adamw", True)
    layout = {"pipe_parallel_size": 4, "pipeline_layers": [0, 3, 1, 0], "engine": "native"}
    assert_alike(curves_of({key: cell_config(*key, 2, layout)}, STEPS, 4), {key: reference(key)})
