"""Schedules with several stages on each pipeline rank: their steps equal those of one process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.training.layout_runs import zero
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, SGD, SP2, Curve, assert_alike, cells, config, curves_of

STEPS = 6
PP2, PP4 = ({"pipe_parallel_size": ranks, "pipeline_schedule": "interleaved"} for ranks in (2, 4))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PP2), "pp4": (4, PP4), "pp2 of four": (2, {**PP2, "virtual_pipeline_stages": 4}),
    "tp2 x pp2 +sp": (4, {**PP2, **SP2}), "pp2 recomputed": (2, {**PP2, "checkpoint_activations": True}),
    "pp2 uneven": (2, {**PP2, "pipeline_layers": [0, 3, 5, 0]}),
    **{f"dp2 x pp2 zero{stage}": (4, {**PP2, **zero(stage)}) for stage in range(4)},
    "zero_bubble": (2, {**PP2, "pipeline_schedule": "zero_bubble"}),
    "zero_bubble zero1": (4, {**PP2, **zero(1), "pipeline_schedule": "zero_bubble"}),
    "zero_bubble pp4 of two": (4, {**PP4, "pipeline_schedule": "zero_bubble", "virtual_pipeline_stages": 2}),
    "zero_bubble recomputed": (2, {**PP2, "pipeline_schedule": "zero_bubble", "checkpoint_activations": True}),
    "zbv": (2, {**PP2, "pipeline_schedule": "zbv"}), "zbv pp4": (4, {**PP4, "pipeline_schedule": "zbv"}),
    "zbv zero1": (4, {**PP2, **zero(1), "pipeline_schedule": "zbv"}),
    "zbv tp2 sp": (4, {**PP2, **SP2, "pipeline_schedule": "zbv"}),
    "dualpipev": (2, {**PP2, "pipeline_schedule": "dualpipev"}), "dualpipev pp4": (4, {**PP4, "pipeline_schedule": "dualpipev"}),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "neox tied": {**NEOX, **ADAMW}, "llama": {**LLAMA, **SGD, "no_weight_tying": True}, "rpe tied": {**RPE, **ADAMW},
    "frozen": {**NEOX, **ADAMW, "trainable": {"last_layers": 3}},
}  # fmt: skip
NEW = [(l, "neox tied") for l in LAYOUTS if "zero_b" in l or "zbv" in l or "dual" in l]
DEFAULT = NEW + [("pp2", "neox tied"), ("dp2 x pp2 zero3", "llama"), ("pp4", "rpe tied")]
MORE = [
    ("pp2 of four", "llama"), ("tp2 x pp2 +sp", "neox tied"), ("dp2 x pp2 zero1", "rpe tied"), ("pp4", "frozen"),
    ("dp2 x pp2 zero2", "frozen"), ("pp2 uneven", "neox tied"), ("pp2 recomputed", "llama"),
]  # fmt: skip
PRODUCT = [(layout, model) for layout in LAYOUTS for model in MODELS if (layout, model) not in DEFAULT + MORE]


def model_config(model: str, micro_batch: int, layout: dict[str, Any]) -> dict[str, Any]:
    keys = {"num_layers": 8, "train_micro_batch_size_per_gpu": micro_batch}
    return config(MODELS[model], layout, keys)


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Curve]:
    """One process, one micro-batch of 8."""
    return cache(lambda model: curves_of({model: model_config(model, 8, {})}, STEPS)[model])


@pytest.mark.parametrize(("name", "model"), cells(DEFAULT, MORE, PRODUCT))
def test_virtual_stages_equal_one_process(name: str, model: str, reference: Callable[[str], Curve]) -> None:
    ranks, layout = LAYOUTS[name]
    if model == "rpe tied" and "pipeline_layers" in layout:
        pytest.skip("every stage needs a block for a table of relative positions")
    run = {model: model_config(model, 1, {**layout, "engine": "native"})}
    assert_alike(curves_of(run, STEPS, ranks), {model: reference(model)})
