"""`lora.quantization`: adapters over a base in 4 bits train peft's numbers, the same in every layout."""

import math
import sys
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training.metrics.run_metadata import parameter_counts
from megatron.training.native.engine import NativeEngine
from megatron.training.parallelize import parallelize
from tests.marks import with_more
from tests.model.stages import Weights, random_batch, small
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_goes_on
from tests.training.preference.test_reference import PACKED, PADDED, first_losses, preferences
from tests.training.runs import (
    ADAMW,
    LAYOUTS,
    LLAMA,
    NEOX,
    Curve,
    assert_alike,
    begin,
    config,
    curves_of,
    run_to_end,
)
from tests.training.test_lora import FORMS, STEPS, traced_losses
from tests.training.test_lora_trl import ADAMW as WITH_PEFT
from tests.training.test_lora_trl import RATE, assert_adapters, in_our_names, in_our_weights, trained

# Columns of 64 for each of two ranks, so that blocks are the same in every layout.
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2}
NF4 = {"quantization": "nf4", "init": False}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({**LLAMA, **WIDTHS}, {**NF4, "r": 4, "alpha": 16}),
    "llama, dora, some, copies": (
        {**LLAMA, **WIDTHS, "no_weight_tying": True},
        {**NF4, "r": 2, "dora": True, "target": ["q_proj", "o_proj", "gate_proj"], "modules_to_save": ["lm_head"]},
    ),
    "neox": ({**NEOX, "hidden_size": 128, "num_layers": 2}, {**NF4, "r": 4, "alpha": 4}),
}
SEQUENCE = {"model_parallel_size": 2, "sequence_parallel": True}
TABLE: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: LAYOUTS[name] for name in ("dp2", "tp2", "pp2", "zero1", "zero2", "zero3")},
    "tp2 +sp, recomputed": (2, {**SEQUENCE, "checkpoint_activations": True}),
    "tp2 x pp2 +sp": (4, {**SEQUENCE, "pipe_parallel_size": 2}),
    **{
        f"{name}, deepspeed": (LAYOUTS[name][0], {**LAYOUTS[name][1], "engine": "deepspeed"})
        for name in ("plain", "zero1", "zero2", "zero3")
    },
}
MORE = ("zero3", "zero2, deepspeed")


def values(model: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    keys, lora = MODELS[model]
    return config(ADAMW, keys, layout, lora=lora, train_micro_batch_size_per_gpu=2, **more)


@pytest.fixture(scope="module")
def alone() -> dict[str, Curve]:
    return curves_of({model: values(model, {}) for model in MODELS}, STEPS)


@pytest.mark.parametrize("layout", with_more(TABLE, *MORE, product=set(TABLE) - {"tp2 +sp, recomputed", *MORE}))
def test_layouts_train_as_one_process(alone: dict[str, Curve], layout: str) -> None:
    ranks, keys = TABLE[layout]
    assert_alike(curves_of({model: values(model, keys) for model in MODELS}, STEPS, ranks), alone, norms=1e-4)


# -- beside peft ---------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2, "norm": "rmsnorm", "rms_norm_epsilon": 1e-5,
    "activation": "swiglu", "intermediate_size": 128, "padded_vocab_size": 96, "no_weight_tying": True,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
}  # fmt: skip


def huggingface_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False, initializer_range=0.2,
        )
    ).eval()  # fmt: skip


def adapters_of(
    rank: int, world_size: int, variants: list[dict[str, Any]], base: Weights, adapters: Weights
) -> list[tuple[list[float], Weights]]:
    """For the pool: losses of steps on one batch, and the weights after them."""
    found = []
    for lora in variants:
        args = small(**SHAPE, **WITH_PEFT, lora=lora, train_micro_batch_size_per_gpu=2).for_world(1)
        found.append(trained(args, base, adapters, [random_batch(args, rows=2)]))
    return found


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.more), True])
def test_three_steps_are_pefts(dora: bool) -> None:
    """On transformers' model with weights that bitsandbytes quantised and unpacked."""
    model = huggingface_model()
    base = in_our_weights({name: value.clone() for name, value in model.state_dict().items()}, 2)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(bnb.dequantize_4bit(*bnb.quantize_4bit(module.weight, quant_type="nf4")))
    torch.manual_seed(4)
    asked = LoraConfig(r=4, lora_alpha=8, use_dora=dora, target_modules="all-linear")
    theirs = get_peft_model(model, asked)
    params = {name: param for name, param in theirs.named_parameters() if param.requires_grad}
    first = in_our_names({name: param.detach().clone() for name, param in params.items()})
    batch, losses = random_batch(small(**SHAPE, train_micro_batch_size_per_gpu=2), rows=2), []
    optimizer = torch.optim.AdamW(params.values(), lr=RATE, weight_decay=0.0)
    for _ in range(STEPS):
        logits = theirs(input_ids=batch.tokens).logits
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (each * batch.loss_weights.flatten()).sum() / batch.loss_weights.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    lora = {"r": 4, "alpha": 8, "dora": dora, "quantization": "nf4"}
    (found, weights), (plain, _) = run_ranks(adapters_of, 1, [lora, {**lora, "quantization": None}], base, first)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    assert_adapters(weights, dict(params))
    assert abs(plain[0] / losses[0] - 1.0) > 1e-3


# -- as runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", with_more(["tp2", "zero3"], "zero3"))
def test_resumes_bit_for_bit(layout: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    common = values(
        "llama, dora, some, copies", keys, precision="bfloat16", train_iters=6, checkpoint_factor=3, warmup=0.3
    )
    common["lora"] = {**common["lora"], "double_quant": True, "dropout": 0.1}
    assert_goes_on(ranks, common, tmp_path)
    assert not any("word_embeddings.weight" in file.name for file in tmp_path.rglob("layer_*"))


def loaded(
    rank: int, world_size: int, configs: list[dict[str, Any]]
) -> list[tuple[Tensor, list[Tensor], tuple[int, int]]]:
    """For the pool: of each run an unpacked weight, two as they are held, and (all, trained) parameters."""
    found = []
    for given in configs:
        training = begin(given)
        stage = training.engine.stage
        linears = [stage.layers["2"].attention.dense, stage.layers["3"].mlp.linear1]  # type: ignore[union-attr]
        counts = parameter_counts(training.args, training.groups, stage)
        found.append((linears[0].dense_weight().clone(), [linear.weight.clone() for linear in linears], counts))
        training.engine.close()
    return found


def test_a_checkpoint_is_quantised_as_it_is_loaded(tmp_path: Path) -> None:
    """And all of its weights count as parameters."""
    base = config(ADAMW, MODELS["llama"][0], train_iters=1, checkpoint_factor=1, save=str(tmp_path), lora=None)
    weights = run_ranks(run_to_end, 1, base)[0][1]
    over = values("llama", {}, load=str(tmp_path), finetune=True)
    plain = {**over, "lora": {**over["lora"], "quantization": None}}
    (dense, packed, counts), (_, _, plain_counts) = run_ranks(loaded, 1, [over, plain])[0]
    asked = (weights[2]["attention.dense.weight"], weights[3]["mlp.linear1.weight"])
    quantised = [bnb.quantize_4bit(weight, quant_type="nf4") for weight in asked]
    assert all(torch.equal(ours, theirs) for ours, (theirs, _) in zip(packed, quantised, strict=True))
    assert torch.equal(dense, bnb.dequantize_4bit(*quantised[0]))
    assert counts == plain_counts and counts[0] > 5 * counts[1]


@pytest.mark.more
def test_compiled_and_recomputed() -> None:
    lora = {**NF4, "r": 4, "double_quant": True, "dora": True}
    configs = [config(ADAMW, MODELS["llama"][0], form, lora=lora, train_micro_batch_size_per_gpu=2) for form in FORMS]
    first, *others = run_ranks(traced_losses, 1, configs)[0]
    for found in others:
        assert found == pytest.approx(first, rel=1e-6)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora": {"quantization": "nf4", "save": "both"}}, "lora.save: both.*4 bits"),
        ({"lora": {"double_quant": True}}, "lora.double_quant: true.*quantised"),
        ({"lora": {"quantization": "nf4"}, "precision_fp8": "rowwise"}, "lora.quantization: nf4.*precision_fp8"),
    ],
)
def test_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeoXArgs.from_dict(config(LLAMA, keys, precision="bfloat16"))


def test_refused_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    args = small(**SHAPE, lora={"quantization": "nf4"}, train_micro_batch_size_per_gpu=2).for_world(1)
    groups = ParallelGroups.single()
    with pytest.raises(ConfigError, match=r"lora.quantization: nf4.*bitsandbytes.*neox\[bnb\]"):
        parallelize(build_stage(args, groups), LANGUAGE_MODELLING, args, groups, NativeEngine)


@pytest.mark.parametrize("layout", with_more(["plain", "tp2"], product=["tp2"]))
def test_the_reference_of_pairs_is_the_quantised_model(layout: str, tmp_path: Path) -> None:
    """Packed rows and padded ones."""
    ranks, keys = LAYOUTS[layout]
    lora = {"lora": {"r": 4, "alpha": 8, "quantization": "nf4", "double_quant": True}}
    runs = [
        {k: v for k, v in preferences(tmp_path, rows, keys, lora).items() if k != "reference_cache_dir"}
        for rows in (PADDED, PACKED)
    ]
    for found in run_ranks(first_losses, ranks, runs):
        assert found == pytest.approx([math.log(2)] * 2, abs=1e-6)
