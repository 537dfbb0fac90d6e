"""`lora.quantization`: adapters over a base in 4 bits train peft's numbers, the same in every layout."""

import math
import sys
from functools import partialmethod
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
from megatron.training.adapters import begin_adapters
from megatron.training.metrics.run_metadata import parameter_counts
from megatron.training.native.engine import NativeEngine
from megatron.training.parallelize import parallelize
from tests.marks import with_more
from tests.model.stages import groups_of, random_batch, small
from tests.model.test_transformers import llama_weights
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_goes_on
from tests.training.preference.test_reference import PACKED, PADDED, first_losses, preferences
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, NEOX, Curve, begin, config, curves, furthest, run_to_end, whole
from tests.training.test_lora_trl import in_our_names

STEPS = 3
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
FIRST = ("tp2 +sp, recomputed",)
SOAK = ("dp2", "tp2", "zero1", "zero2", "plain, deepspeed", "zero1, deepspeed")


def values(model: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    keys, lora = MODELS[model]
    return config(ADAMW, keys, layout, lora=lora, train_micro_batch_size_per_gpu=2, **more)


@pytest.fixture(scope="module")
def alone() -> dict[str, Curve]:
    configs = [values(model, {}) for model in MODELS]
    parts = run_ranks(curves, 1, configs, STEPS)[0]
    return {model: whole([part], given) for model, part, given in zip(MODELS, parts, configs, strict=True)}


@pytest.mark.parametrize("layout", with_more(TABLE, *(set(TABLE) - {*FIRST, *SOAK}), product=SOAK))
def test_layouts_train_as_one_process(alone: dict[str, Curve], layout: str) -> None:
    ranks, keys = TABLE[layout]
    configs = [values(model, keys) for model in MODELS]
    found = run_ranks(curves, ranks, configs, STEPS)
    for i, model in enumerate(MODELS):
        losses, norms, weights = furthest(whole([rank[i] for rank in found], configs[i]), alone[model])
        assert losses < 1e-5 and norms < 1e-4 and weights < 1e-4, (model, losses, norms, weights)


# -- beside peft ---------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2, "norm": "rmsnorm", "rms_norm_epsilon": 1e-5,
    "activation": "swiglu", "intermediate_size": 128, "padded_vocab_size": 96, "no_weight_tying": True,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
}  # fmt: skip
RATE = 1e-2


def huggingface_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False, initializer_range=0.2,
        )
    ).eval()  # fmt: skip


def ours(
    rank: int, world_size: int, lora: dict[str, Any], base: dict, adapters: dict
) -> tuple[list[float], dict[int, dict[str, Tensor]]]:
    """For the pool: losses of steps on one batch, and the adapters after them."""
    args = small(
        **SHAPE, lora=lora, optimizer={"type": "AdamW", "params": {"lr": RATE}}, weight_decay=0.0,
        gradient_clipping=0.0, train_iters=STEPS, train_micro_batch_size_per_gpu=2,
    ).for_world(1)  # fmt: skip
    groups = groups_of(args, 1)
    engine = parallelize(build_stage(args, groups), LANGUAGE_MODELLING, args, groups, NativeEngine)
    engine.set_weights(base)
    begin_adapters(engine)
    engine.set_weights({n: {k: v for k, v in of.items() if "magnitude" not in k} for n, of in adapters.items()})
    batch = random_batch(args, rows=2)
    losses = [float(engine.train_step([batch], RATE).loss) for _ in range(STEPS)]
    assert (engine.stage.layers["2"].attention.dense.weight.dtype == torch.uint8) is args.quantized  # type: ignore[union-attr]
    weights = engine.weights(master=True)
    engine.close()
    return losses, weights


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.more), True])
def test_three_steps_are_pefts(dora: bool) -> None:
    """On transformers' model with weights that bitsandbytes quantised and unpacked."""
    model = huggingface_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    base = {
        layer: {name.replace("norm.weight", "norm.scale"): value for name, value in tensors.items()}
        for layer, tensors in llama_weights(state, 2).items()
    }
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(bnb.dequantize_4bit(*bnb.quantize_4bit(module.weight, quant_type="nf4")))
    torch.manual_seed(4)
    asked = LoraConfig(r=4, lora_alpha=8, use_dora=dora, target_modules="all-linear")
    theirs = get_peft_model(model, asked)
    params = {name: param for name, param in theirs.named_parameters() if param.requires_grad}
    first = {name: param.detach().clone() for name, param in params.items()}
    args = small(**SHAPE, train_micro_batch_size_per_gpu=2)
    batch, losses = random_batch(args, rows=2), []
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
    found, weights = run_ranks(ours, 1, lora, base, in_our_names(first))[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for layer, values_of_layer in in_our_names(dict(params)).items():
        for name, value in values_of_layer.items():
            torch.testing.assert_close(weights[layer][name], value.detach(), atol=2e-5, rtol=1e-4)
    plain, _ = run_ranks(ours, 1, {**lora, "quantization": None}, base, in_our_names(first))[0]
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


def dense_of_loaded(rank: int, world_size: int, given: dict[str, Any]) -> tuple[Tensor, list[Tensor], tuple[int, int]]:
    """For the pool: an unpacked weight, the packed ones, and (all, trained) parameters."""
    training = begin(given)
    stage = training.engine.stage
    linears = [stage.layers["2"].attention.dense, stage.layers["3"].mlp.linear1]  # type: ignore[union-attr]
    found = linears[0].dense_weight().clone(), [of.weight.clone() for of in linears]  # type: ignore[operator,union-attr]
    counts = parameter_counts(training.args, training.groups, stage)
    training.engine.close()
    return (*found, counts)  # type: ignore[return-value]


def test_a_checkpoint_is_quantised_as_it_is_loaded(tmp_path: Path) -> None:
    """And all of its weights count as parameters."""
    base = config(ADAMW, MODELS["llama"][0], train_iters=1, checkpoint_factor=1, save=str(tmp_path), lora=None)
    trained = run_ranks(run_to_end, 1, base)[0][1]
    over = {"load": str(tmp_path), "finetune": True}
    dense, packed, counts = run_ranks(dense_of_loaded, 1, values("llama", {}, **over))[0]
    for weight, found in (
        (trained[2]["attention.dense.weight"], packed[0]),
        (trained[3]["mlp.linear1.weight"], packed[1]),
    ):
        assert torch.equal(bnb.quantize_4bit(weight, quant_type="nf4")[0], found)
    assert torch.equal(
        dense, bnb.dequantize_4bit(*bnb.quantize_4bit(trained[2]["attention.dense.weight"], quant_type="nf4"))
    )
    plain = values("llama", {}, **over)
    plain["lora"] = {**plain["lora"], "quantization": None}
    training = run_ranks(counts_of, 1, plain)[0]
    assert counts == training and counts[0] > 5 * counts[1]


def counts_of(rank: int, world_size: int, given: dict[str, Any]) -> tuple[int, int]:
    """For the pool."""
    training = begin(given)
    counts = parameter_counts(training.args, training.groups, training.engine.stage)
    training.engine.close()
    return counts


def traced_losses(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[list[float]]:
    """For the pool: what torch.compile traces is run operator by operator."""
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
    return [part.losses for part in curves(rank, world_size, configs, STEPS)]


@pytest.mark.more
def test_compiled_and_recomputed() -> None:
    forms: list[dict[str, Any]] = [
        {},
        {"compile": "block"},
        {"checkpoint_activations": True},
        {"checkpoint_activations": True, "recompute_granularity": "selective"},
    ]
    for double_quant in (False, True):
        lora = {**NF4, "r": 4, "double_quant": double_quant, "dora": double_quant}
        configs = [
            config(ADAMW, MODELS["llama"][0], form, lora=lora, train_micro_batch_size_per_gpu=2) for form in forms
        ]
        first, *others = run_ranks(traced_losses, 1, configs)[0]
        for found in others:
            assert found == pytest.approx(first, rel=1e-6)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora": {"quantization": "nf4", "save": "both"}}, "lora.save: both: weights in 4 bits are not what"),
        ({"lora": {"double_quant": True}}, "lora.double_quant: true is for quantised weights"),
        ({"lora": {"quantization": "nf4"}, "precision_fp8": "rowwise"}, "lora.quantization: nf4 multiplies unpacked"),
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
    with pytest.raises(ConfigError, match=r"lora.quantization: nf4 needs bitsandbytes: pip install 'neox\[bnb\]'"):
        parallelize(build_stage(args, groups), LANGUAGE_MODELLING, args, groups, NativeEngine)


@pytest.mark.parametrize("layout", with_more(["plain", "tp2"], "tp2"))
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
