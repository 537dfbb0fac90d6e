"""`lora`: the same numbers in every layout over weights that keep their bits; in 4 bits they are peft's."""

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
from megatron.model.weight_map import is_adapter
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training.metrics.run_metadata import parameter_counts
from megatron.training.native.engine import NativeEngine
from megatron.training.parallelize import parallelize
from tests.methods.preferences.test_reference import PACKED, PADDED, first_losses, preferences
from tests.methods.reward.test_runs import reward_data, values_of
from tests.methods.unlearning.test_runs import DIVERGENCE
from tests.model.stages import Weights, random_batch, small
from tests.pool import run_ranks
from tests.training import runs
from tests.training import test_lora_trl as with_peft
from tests.training.checkpoint.test_resume import assert_goes_on
from tests.training.runs import ADAMW, LLAMA, NEOX, TABLE, Curve, assert_alike, cells, config, curves, curves_of
from tests.training.test_mamba import MODELS as HYBRID

STEPS, UNTIED = 3, {"no_weight_tying": True}
# Columns of 64 for each of two ranks, so that blocks in 4 bits are the same in every layout.
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2}
NF4 = {"quantization": "nf4", "init": False}
DORA, NF4_KIMI = "nf4: llama, dora, some, copies", "nf4: kimi delta attention"
LATENT = {"num_kv_heads": None, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 7}
# `init: false`: with B of 0 the first step would tell nothing of A.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama, grouped queries": (LLAMA, {"r": 4, "alpha": 16, "init": False}),
    "llama, dora, some, copies": (
        {**LLAMA, "num_kv_heads": 4, **UNTIED},
        {"r": 2, "alpha": 1, "dora": True, "rslora": True, "init": False,  # with more a rounding grows tenfold
         "target": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
         "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "neox, tied copy": (NEOX, {"r": 4, "alpha": 4, "init": False, "modules_to_save": ["embed_in"]}),
    "neox, dora": (NEOX, {"r": 4, "alpha": 4, "init": False, "dora": True, "target": ["q_proj", "dense", "up_proj"]}),
    "llama, ranks and blocks": (LLAMA, {
        "r": 4, "alpha": 4, "init": False, "dora": True,
        "target": ["q_proj", "v_proj", "layers.0.mlp.up_proj", "gate_proj"],
        "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"q_proj": 2},
    }),
    "mamba 2 and shared experts": (HYBRID["hybrid"], {"r": 4, "alpha": 4, "init": False}),
    "gated delta net": (HYBRID["delta"], {"r": 4, "alpha": 4, "init": False}),
    "gated delta net, parts, dora": (
        HYBRID["delta"],
        {"r": 2, "alpha": 2, "init": False, "dora": True, "target": ["in_proj_qkv", "in_proj_b", "out_proj"]},
    ),
    "kimi delta attention": (HYBRID["kimi"], {"r": 4, "alpha": 4, "init": False}),
    "latent attention, dora": (
        {**LLAMA, **LATENT, "q_lora_rank": 12}, {"r": 4, "alpha": 4, "init": False, "dora": True}
    ),
    "nf4: llama": ({**LLAMA, **WIDTHS}, {**NF4, "r": 4, "alpha": 16}),
    DORA: ({**LLAMA, **WIDTHS, **UNTIED},
           {**NF4, "r": 2, "dora": True, "target": ["q_proj", "o_proj", "gate_proj"], "modules_to_save": ["lm_head"]}),
    NF4_KIMI: (
        {**HYBRID["kimi"], "hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "kv_lora_rank": 64,
         "v_head_dim": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
        {**NF4, "r": 4, "alpha": 4},
    ),
    "nf4: neox": ({**NEOX, "hidden_size": 128, "num_layers": 2}, {**NF4, "r": 4, "alpha": 4}),
}  # fmt: skip


def values(model: str, layout: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    keys, lora = MODELS[model]
    return config(ADAMW, keys, layout, lora=lora, train_micro_batch_size_per_gpu=2, **overrides)


@pytest.fixture(scope="module")
def one_process() -> dict[str, Curve]:
    return curves_of({model: values(model, {}) for model in MODELS}, STEPS)


def test_only_adapters_are_trained(one_process: dict[str, Curve]) -> None:
    for model, curve in curves_of({model: values(model, {}) for model in MODELS}, 0).items():
        for layer, tensors in curve.weights.items():
            for name, value in tensors.items():
                assert value.equal(one_process[model].weights[layer][name]) is not is_adapter(name), (
                    model,
                    layer,
                    name,
                )


@pytest.mark.parametrize("layout", cells(
    ["tp2 sp"],
    ["zero3"],
    ["tp2 pp2 sp", "dp2", "tp2", "pp2", "zero1", "zero2",
     *(f"{name}, deepspeed" for name in ("plain", "zero1", "zero2", "zero3"))],
))  # fmt: skip
def test_layouts_train_as_one_process(one_process: dict[str, Curve], layout: str) -> None:
    ranks, keys = TABLE[layout]
    assert_alike(curves_of({model: values(model, keys) for model in MODELS}, STEPS, ranks), one_process, norms=1e-4)


# -- how it is computed
RECOMPUTED: dict[str, Any] = {"checkpoint_activations": True}
FORMS: list[dict[str, Any]] = [
    {},
    {"compile": "block"},
    RECOMPUTED,
    {**RECOMPUTED, "recompute_granularity": "selective"},
]
DROPOUT = {"init": False, "dropout": 0.2, "dora": True}


def traced_losses(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[list[float]]:
    """For the pool: what torch.compile traces is run operator by operator."""
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
    return [part.losses for part in curves(rank, world_size, configs, STEPS)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "model", "lora"), cells(
    [], product=[
        ("tp2 sp", {**LLAMA, "num_kv_heads": 1}, DROPOUT), ("plain", LLAMA, DROPOUT),
        ("plain", MODELS[DORA][0], {**NF4, "double_quant": True, "dora": True}),
        ("plain", MODELS["nf4: llama"][0], NF4),
    ],
))  # fmt: skip
def test_compiled_and_recomputed(layout: str, model: dict[str, Any], lora: dict[str, Any]) -> None:
    """With dropout, whose masks are functions of seeds."""
    ranks, keys = TABLE[layout]
    variants = [{"lora": {"r": 4, "alpha": 8, **lora}, **form} for form in FORMS]
    variants.append({"lora": {**variants[0]["lora"], "dropout": 0.0}})
    configs = [config(ADAMW, model, keys, form, train_micro_batch_size_per_gpu=2) for form in variants]
    eager_losses, *transformed, without_dropout = run_ranks(traced_losses, ranks, configs, timeout=500)[0]
    for losses in transformed:
        assert losses == pytest.approx(eager_losses, rel=1e-6)
    assert (abs(without_dropout[0] - eager_losses[0]) > 1e-4) is ("dropout" in lora)


# -- objectives
SOME_TARGETS = {"lora": {"r": 4, "alpha": 8, "init": False, "target": ["q_proj", "o_proj", "gate_proj"]}}


def objectives(folder: Path, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Pairs, rewards, and unlearning beside the distributions of the model without its adapters."""
    rows = {"pack_impl": "best_fit", "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    retained = {**SOME_TARGETS["lora"], "modules_to_save": ["embed_tokens"]}
    return [
        preferences(folder, PACKED, layout, SOME_TARGETS, padded_vocab_size=384, reference_cache_dir=None),
        values_of(reward_data(folder), layout, SOME_TARGETS, rows, padded_vocab_size=384),
        config(LLAMA, ADAMW, DIVERGENCE, layout, lora=retained, train_micro_batch_size_per_gpu=2),
    ]


@pytest.mark.parametrize("layout", cells(["tp2 sp"], product=["zero3, deepspeed", "pp2", "zero3"]))
def test_objectives_in_layouts(layout: str, tmp_path: Path) -> None:
    ranks, keys = TABLE[layout]
    expected = run_ranks(curves, 1, objectives(tmp_path, {}), STEPS)[0]
    for actual, reference in zip(run_ranks(curves, ranks, objectives(tmp_path, keys), STEPS)[0], expected, strict=True):
        assert actual.losses == pytest.approx(reference.losses, rel=1e-5)
        assert actual.norms == pytest.approx(reference.norms, rel=1e-4)


@pytest.mark.parametrize("layout", cells(["plain"], product=["tp2"]))
def test_the_reference_of_pairs_is_the_quantised_model(layout: str, tmp_path: Path) -> None:
    ranks, keys = TABLE[layout]
    lora = {"lora": {"r": 4, "alpha": 8, "quantization": "nf4", "double_quant": True}}
    pairs = [preferences(tmp_path, rows, keys, lora, reference_cache_dir=None) for rows in (PADDED, PACKED)]
    for losses in run_ranks(first_losses, ranks, pairs):
        assert losses == pytest.approx([math.log(2)] * 2, abs=1e-6)


# -- in 4 bits, beside peft
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2, "norm": "rmsnorm", "rms_norm_epsilon": 1e-5,
    "activation": "swiglu", "intermediate_size": 128, "padded_vocab_size": 96, **UNTIED,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "train_micro_batch_size_per_gpu": 2,
}  # fmt: skip


def adapters_of(rank: int, world_size: int, variants: list[Any], *weights: Weights) -> list[with_peft.Trained]:
    """For the pool: losses of steps on one batch, and the weights after them."""
    args_by_variant = [small(**SHAPE, **with_peft.ADAMW, lora=lora).for_world(1) for lora in variants]
    return [with_peft.trained(args, *weights, [random_batch(args, rows=2)]) for args in args_by_variant]


@pytest.mark.parametrize("dora", cells([True], [False]))
def test_three_steps_are_pefts(dora: bool) -> None:
    """On transformers' model with weights that bitsandbytes quantised and unpacked."""
    torch.manual_seed(3)
    shape = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False,
                        initializer_range=0.2)  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    base = with_peft.in_our_weights({name: value.clone() for name, value in model.state_dict().items()}, 2)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(bnb.dequantize_4bit(*bnb.quantize_4bit(module.weight, quant_type="nf4")))
    torch.manual_seed(4)
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, use_dora=dora, target_modules="all-linear"))
    params = {name: param for name, param in peft_model.named_parameters() if param.requires_grad}
    initial_adapters = with_peft.in_our_names({name: param.detach().clone() for name, param in params.items()})
    batch = random_batch(small(**SHAPE), rows=2)

    def loss_of() -> Tensor:
        logits = peft_model(input_ids=batch.tokens).logits.flatten(0, 1)
        token_losses = torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        return (token_losses * batch.loss_weights.flatten()).sum() / batch.loss_weights.sum()

    losses = with_peft.torch_steps(params, loss_of)
    lora = {"r": 4, "alpha": 8, "dora": dora, "quantization": "nf4"}
    (actual_losses, weights), (unquantised_losses, _) = run_ranks(
        adapters_of, 1, [lora, {**lora, "quantization": None}], base, initial_adapters
    )[0]
    assert actual_losses == pytest.approx(losses, rel=1e-5)
    with_peft.assert_adapters(weights, dict(params))
    assert abs(unquantised_losses[0] / losses[0] - 1.0) > 1e-3


@pytest.mark.parametrize(("layout", "model"), cells([("tp2", DORA)], [("tp2", NF4_KIMI)], [("zero3", DORA)]))
def test_resumes_bit_for_bit(layout: str, model: str, tmp_path: Path) -> None:
    ranks, keys = TABLE[layout]
    common = values(model, keys, precision="bfloat16", train_iters=6, checkpoint_factor=3, warmup=0.3)
    common["lora"] = {**common["lora"], "double_quant": True, "dropout": 0.1}
    assert_goes_on(ranks, common, tmp_path)
    assert not any("word_embeddings.weight" in file.name for file in tmp_path.rglob("layer_*"))


def loaded(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[tuple[Tensor, list[Tensor], Any]]:
    """For the pool: of each run an unpacked weight, two as they are held, and (all, trained) parameters."""
    results = []
    for training in runs.begin_each(configs):
        stage = training.engine.stage
        linears = [stage.layers["2"].attention.dense, stage.layers["3"].mlp.linear1]  # type: ignore[union-attr]
        counts = parameter_counts(training.args, training.groups, stage)
        results.append((linears[0].dense_weight().clone(), [linear.weight.clone() for linear in linears], counts))
    return results


def test_a_checkpoint_is_quantised_as_it_is_loaded(tmp_path: Path) -> None:
    """All weights of the checkpoint count as parameters."""
    base = config(ADAMW, MODELS["nf4: llama"][0], train_iters=1, checkpoint_factor=1, save=str(tmp_path))
    weights = run_ranks(runs.run_to_end, 1, base)[0][1]
    tuned = values("nf4: llama", {}, load=str(tmp_path), finetune=True)
    unquantised = {**tuned, "lora": {**tuned["lora"], "quantization": None}}
    (dense, packed, counts), (_, _, plain_counts) = run_ranks(loaded, 1, [tuned, unquantised])[0]
    dense_weights = (weights[2]["attention.dense.weight"], weights[3]["mlp.linear1.weight"])
    quantised = [bnb.quantize_4bit(weight, quant_type="nf4") for weight in dense_weights]
    assert all(torch.equal(actual, expected) for actual, (expected, _) in zip(packed, quantised, strict=True))
    assert torch.equal(dense, bnb.dequantize_4bit(*quantised[0]))
    assert counts == plain_counts and counts[0] > 5 * counts[1]


@pytest.mark.parametrize(("keys", "message"), [
    ({"lora": {"quantization": "nf4", "save": "both"}}, "lora.save: both.*4-bit"),
    ({"lora": {"double_quant": True}}, "lora.double_quant: true.*quantised"),
    ({"lora": {"quantization": "nf4"}, "precision_fp8": "rowwise"}, "lora.quantization: precision_fp8.*nf4"),
])  # fmt: skip
def test_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeoXArgs.from_dict(config(LLAMA, keys, precision="bfloat16"))


def test_refused_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    args, groups = small(**SHAPE, lora={"quantization": "nf4"}).for_world(1), ParallelGroups.single()
    with pytest.raises(ConfigError, match=r"lora.quantization: nf4.*bitsandbytes.*neox\[bnb\]"):
        parallelize(build_stage(args, groups), LANGUAGE_MODELLING, args, groups, NativeEngine)
