"""`lora`: adapters train the same numbers in every layout, and nothing below them changes a bit."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.weight_map import is_adapter
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.preference.test_reference import PACKED, preferences
from tests.training.preference.test_rewards import reward_data, values_of
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, NEOX, Curve, assert_alike, begin, config, curves, curves_of
from tests.training.test_unlearning import DIVERGENCE

STEPS = 3
UNTIED = {"no_weight_tying": True}
# `init: false`: with B of 0 the first step would tell nothing of A.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama, grouped queries": (LLAMA, {"r": 4, "alpha": 16, "init": False}),
    "llama, dora, some, copies": (
        {**LLAMA, "num_kv_heads": 4, **UNTIED},
        {
            "r": 2,
            "alpha": 1,  # with more a rounding grows tenfold in a step
            "dora": True,
            "rslora": True,
            "init": False,
            "target": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
            "modules_to_save": ["embed_tokens", "lm_head"],
        },
    ),
    "neox, tied copy": (NEOX, {"r": 4, "alpha": 4, "init": False, "modules_to_save": ["embed_in"]}),
    "neox, dora": (NEOX, {"r": 4, "alpha": 4, "init": False, "dora": True, "target": ["q_proj", "dense", "up_proj"]}),
}
SEQUENCE = {"model_parallel_size": 2, "sequence_parallel": True}
TABLE: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: LAYOUTS[name] for name in ("dp2", "tp2", "pp2", "zero2", "zero3")},
    "tp2 +sp": (2, SEQUENCE),
    "tp2 x pp2 +sp": (4, {**SEQUENCE, "pipe_parallel_size": 2, "checkpoint_activations": True}),
    **{
        f"{name}, deepspeed": (LAYOUTS[name][0], {**LAYOUTS[name][1], "engine": "deepspeed"})
        for name in ("zero1", "zero2", "zero3")
    },
}
MORE = ("tp2 x pp2 +sp", "zero3, deepspeed")


def values(model: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    keys, lora = MODELS[model]
    return config(ADAMW, keys, layout, lora=lora, train_micro_batch_size_per_gpu=2, **more)


@pytest.fixture(scope="module")
def alone() -> dict[str, Curve]:
    return curves_of({model: values(model, {}) for model in MODELS}, STEPS)


def first_weights(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[dict[int, dict[str, Tensor]]]:
    """For the pool: the weights that runs begin with."""
    found = []
    for given in configs:
        training = begin(given)
        found.append(training.engine.weights())
        training.engine.close()
    return found


def test_only_adapters_are_trained(alone: dict[str, Curve]) -> None:
    """Down to the last bit."""
    found = run_ranks(first_weights, 1, [values(model, {}) for model in MODELS])[0]
    for model, layers in zip(MODELS, found, strict=True):
        before = {(layer, name): value for layer, tensors in layers.items() for name, value in tensors.items()}
        moved = {(i, name) for (i, name), value in before.items() if not alone[model].weights[i][name].equal(value)}
        assert moved == {key for key in before if is_adapter(key[1])}, model


@pytest.mark.parametrize("layout", with_more(TABLE, *MORE, product=set(TABLE) - {"tp2 +sp", "zero3", *MORE}))
def test_layouts_train_as_one_process(alone: dict[str, Curve], layout: str) -> None:
    ranks, keys = TABLE[layout]
    assert_alike(curves_of({model: values(model, keys) for model in MODELS}, STEPS, ranks), alone, norms=1e-4)


# -- how it is computed --------------------------------------------------------------------------------------


FORMS: list[dict[str, Any]] = [
    {},
    {"compile": "block"},
    {"checkpoint_activations": True},
    {"checkpoint_activations": True, "recompute_granularity": "selective"},
]


def traced_losses(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[list[float]]:
    """For the pool: what torch.compile traces is run operator by operator."""
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
    return [part.losses for part in curves(rank, world_size, configs, STEPS)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", with_more(["plain", "tp2 +sp"], "tp2 +sp", product=["plain"]))
def test_compiled_and_recomputed(layout: str) -> None:
    """With dropout, whose masks are functions of seeds."""
    ranks, keys = {**TABLE, "plain": LAYOUTS["plain"]}[layout]
    lora = {"r": 4, "alpha": 8, "init": False, "dropout": 0.2, "dora": True}
    forms = [{"lora": lora, **form} for form in FORMS] + [{"lora": {**lora, "dropout": 0.0}}]
    configs = [config(ADAMW, LLAMA, keys, form, train_micro_batch_size_per_gpu=2) for form in forms]
    first, *others, without = run_ranks(traced_losses, ranks, configs, timeout=500)[0]
    for found in others:
        assert found == pytest.approx(first, rel=1e-6)
    assert abs(without[0] - first[0]) > 1e-4


# -- objectives ----------------------------------------------------------------------------------------------

SOME = {"lora": {"r": 4, "alpha": 8, "init": False, "target": ["q_proj", "o_proj", "gate_proj"]}}


def objectives(folder: Path, layout: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = preferences(folder, PACKED, layout, SOME, padded_vocab_size=384)
    rows = {"pack_impl": "best_fit", "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    retained = {**SOME["lora"], "modules_to_save": ["embed_tokens"]}
    return [
        {key: value for key, value in pairs.items() if key != "reference_cache_dir"},
        values_of(reward_data(folder), layout, SOME, rows, padded_vocab_size=384),
        config(LLAMA, ADAMW, DIVERGENCE, layout, lora=retained, train_micro_batch_size_per_gpu=2),
    ]


@pytest.mark.parametrize(
    "layout",
    with_more(["tp2 +sp", "pp2", "zero3", "zero3, deepspeed"], "zero3, deepspeed", product=["pp2", "zero3"]),
)
def test_objectives_in_layouts(layout: str, tmp_path: Path) -> None:
    """Pairs, rewards, and unlearning beside the distributions of the model without its adapters."""
    ranks, keys = TABLE[layout]
    expected = run_ranks(curves, 1, objectives(tmp_path, {}), STEPS)[0]
    found = run_ranks(curves, ranks, objectives(tmp_path, keys), STEPS)
    for ours, theirs in zip(found[0], expected, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
