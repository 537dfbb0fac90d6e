"""Pipeline schedules other than 1F1B: their steps equal those of one process, in every layout."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.training.layout_runs import zero
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, SGD, SP2, Curve, assert_alike, cells, config, curves_of

STEPS = 6
SCHEDULES: dict[str, dict[str, Any]] = {
    "interleaved": {"pipeline_schedule": "interleaved"},
    "interleaved, four": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 4},
    "uneven": {"pipeline_schedule": "interleaved", "pipeline_layers": [0, 3, 5, 0]},
    "zero_bubble": {"pipeline_schedule": "zero_bubble"},
    "zero_bubble, two": {"pipeline_schedule": "zero_bubble", "virtual_pipeline_stages": 2},
    "zbv": {"pipeline_schedule": "zbv"}, "dualpipev": {"pipeline_schedule": "dualpipev"},
}  # fmt: skip
ZEROS = tuple(f"zero{stage}" for stage in range(4))
RECOMPUTE, SELECTIVE = {"checkpoint_activations": True}, {"recompute_granularity": "selective"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {}), "pp4": (4, {"pipe_parallel_size": 4}), "tp2 sp": (4, SP2), "recompute": (2, RECOMPUTE),
    "selective": (2, {**RECOMPUTE, **SELECTIVE}), "in host memory": (2, {**RECOMPUTE, "checkpoint_in_cpu": True}),
    **{name: (4, zero(stage)) for stage, name in enumerate(ZEROS)},
}  # fmt: skip
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
MODELS: dict[str, dict[str, Any]] = {
    "neox tied": {**NEOX, **ADAMW}, "llama": {**LLAMA, **SGD, "no_weight_tying": True}, "rpe tied": {**RPE, **ADAMW},
    "frozen": {**NEOX, **ADAMW, "trainable": {"last_layers": 3}},
    "adapters, dropout": {**LLAMA, **ADAMW, "lora": {"r": 4, "alpha": 8, "dropout": 0.1, "dora": True}},
    "dropout": {**LLAMA, **ADAMW, "hidden_dropout": 0.2, **DOCUMENTS},
}  # fmt: skip
LATENT = {**LLAMA, **ADAMW, "num_kv_heads": None, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 6}  # fmt: skip
DEFAULT_CELLS = [
    ("interleaved", "zero3", "llama"), ("zero_bubble", "zero1", "rpe tied"), ("zbv", "pp4", "neox tied"),
    ("zero_bubble", "tp2 sp", "latent"),  # whose linears before the heads are replicated
]  # fmt: skip
MORE_CELLS = [
    ("interleaved", "pp2", "neox tied"), ("uneven", "pp2", "neox tied"), ("zero_bubble, two", "pp4", "frozen"),
    ("zero_bubble", "selective", "llama"),
]  # fmt: skip
SAMPLED_PRODUCT = [
    ("interleaved", "pp4", "rpe tied"), ("interleaved", "zero2", "frozen"), ("interleaved", "tp2 sp", "neox tied"),
    ("interleaved, four", "recompute", "llama"), ("zbv", "tp2 sp", "llama"), ("zbv", "zero1", "frozen"),
    ("zbv", "recompute", "adapters, dropout"), ("dualpipev", "tp2 sp", "frozen"), ("dualpipev", "pp4", "rpe tied"),
    ("zero_bubble", "in host memory", "adapters, dropout"), ("zbv", "selective", "dropout"),
    ("interleaved", "pp2", "dropout"),
]  # fmt: skip
REFUSED = {(schedule, f"zero{stage}") for schedule in ("zero_bubble", "zero_bubble, two", "zbv", "dualpipev")
           for stage in (2, 3)}  # fmt: skip
REFUSED |= {("interleaved, four", "pp4"), ("uneven", "pp4")}  # too few blocks
REFUSED |= {("dualpipev", f"zero{stage}") for stage in range(2)}  # two micro-batches on each data rank
PRODUCT = [
    (schedule, layout, list(MODELS)[i % len(MODELS)])
    for i, (schedule, layout) in enumerate(product(SCHEDULES, LAYOUTS))
    if (schedule, layout) not in REFUSED and (schedule, i % len(MODELS)) != ("uneven", 2)  # rpe needs blocks everywhere
]
PRODUCT = [  # dropout's masks differ between data ranks, and an adapter's between tensor ranks
    (schedule, layout, "llama" if "dropout" in model and layout in ("tp2 sp", *ZEROS) else model)
    for schedule, layout, model in PRODUCT
]
PRODUCT = SAMPLED_PRODUCT + [cell for cell in PRODUCT if cell not in DEFAULT_CELLS + MORE_CELLS + SAMPLED_PRODUCT]


def model_config(model: str, micro_batch: int, *layout: dict[str, Any]) -> dict[str, Any]:
    keys = {"num_layers": 8, "train_micro_batch_size_per_gpu": micro_batch}
    return config({**MODELS, "latent": LATENT}[model], {"pipe_parallel_size": 2} if layout else {}, *layout, keys)


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Curve]:
    """One process, one micro-batch of 8; with dropout the micro-batches of all, as each has its own mask."""
    return cache(lambda model: curves_of({model: model_config(model, 1 if "dropout" in model else 8)}, STEPS)[model])


@pytest.mark.parametrize(("schedule", "layout", "model"), cells(DEFAULT_CELLS, MORE_CELLS, PRODUCT))
def test_schedules_equal_one_process(schedule: str, layout: str, model: str, reference: Callable[[str], Curve]) -> None:
    ranks, keys = LAYOUTS[layout]
    run = {model: model_config(model, 1, SCHEDULES[schedule], keys)}
    assert_alike(curves_of(run, STEPS, ranks), {model: reference(model)})


@pytest.mark.product
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_bf16_is_close_to_one_process(schedule: str) -> None:
    """Both round to 8 bits, and gradients of micro-batches are summed in fp32."""
    keys = {"num_layers": 8, "precision": "bfloat16", "train_micro_batch_size_per_gpu": 1}
    expected = curves_of({"run": config(LLAMA, ADAMW, keys)}, STEPS)
    layout = {"pipe_parallel_size": 2, "pipeline_schedule": schedule, "engine": "native"}
    stages = curves_of({"run": config(LLAMA, ADAMW, keys, layout)}, STEPS, 2)
    assert_alike(stages, expected, losses=1e-3, norms=1e-2, weights=1e-2)


def test_a_step_of_one_micro_batch() -> None:
    """Gradients of norms are in fp32 before deferred ones, in bf16, are there; ZeRO 1 sums them together."""
    keys = {"num_layers": 4, "precision": "bfloat16", "train_batch_size": 4, "pipe_parallel_size": 2,
            "train_micro_batch_size_per_gpu": 2, "engine": "native", **zero(1)}  # fmt: skip
    curves = curves_of({s: config(LLAMA, ADAMW, keys, pipeline_schedule=s) for s in ("1f1b", "zero_bubble")}, 3, 4)
    assert_alike({"zero_bubble": curves["zero_bubble"]}, {"zero_bubble": curves["1f1b"]}, weights=1e-3)


@pytest.mark.product
def test_fp8_rounds_deferred_weight_gradients_alike() -> None:
    """Each micro-batch is rounded by itself, so stages make no difference."""
    keys = {"num_layers": 8, "precision": "bfloat16", "precision_fp8": "tensorwise", "hidden_size": 64,
            "train_micro_batch_size_per_gpu": 1, "pipe_parallel_size": 2, "engine": "native"}  # fmt: skip
    curves = curves_of({s: config(LLAMA, ADAMW, keys, pipeline_schedule=s) for s in ("1f1b", "zero_bubble")}, 3, 2)
    assert_alike({"zero_bubble": curves["zero_bubble"]}, {"zero_bubble": curves["1f1b"]}, weights=1e-3)


@pytest.mark.product
def test_steps_that_are_left_out_leave_no_gradient() -> None:
    """A loss scale that overflows at first: what was deferred in these steps changes nothing later."""
    fp16 = {"precision": "fp16", "fp16": {"initial_scale_power": 30, "hysteresis": 1}}
    keys = {"num_layers": 4, "train_micro_batch_size_per_gpu": 2, "pipe_parallel_size": 2, "engine": "native"}
    curves = curves_of({s: config(LLAMA, ADAMW, fp16, keys, pipeline_schedule=s) for s in ("1f1b", "zbv")}, 20, 2)
    assert any(math.isnan(norm) for norm in curves["zbv"].norms[:4]), "the first steps overflow"
    losses = {name: curve.losses[-4:] for name, curve in curves.items()}
    assert losses["zbv"] == pytest.approx(losses["1f1b"], rel=2e-3) and not math.isnan(curves["zbv"].norms[-1])
