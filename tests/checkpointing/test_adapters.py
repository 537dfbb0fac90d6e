"""Adapters against peft: its folders give its logits here, ours give ours there, merged ones the same."""

import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpointing import CheckpointError, find_checkpoint, load_checkpoint_args, load_weights, read_manifest
from megatron.checkpointing.adapters import AdapterSource, export_peft, open_base, open_with_base
from megatron.checkpointing.adapters.exporting import compare_with_peft
from megatron.checkpointing.adapters.merging import compare_merged, unmerged_logits, write_adapters, write_merged
from megatron.checkpointing.families.multimodal import TEXT_TOWERS
from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf
from megatron.checkpointing.huggingface.logit_check import neox_logits
from megatron.model.weight_map import adapter_params
from tests.checkpointing.family_models import VOCAB, random_model
from tests.checkpointing.family_runs import TOKENS, logits_by_layout
from tests.checkpointing.golden import fails
from tests.checkpointing.test_multimodal import MODELS as MULTIMODAL
from tests.checkpointing.test_multimodal import folder as multimodal_folder
from tests.marks import with_more

BOUND = 2e-5  # absolute, of fp32 logits of order 1
DELTA_FACTOR = 10  # of bounds with delta rules, whose norm of heads magnifies rounding
WITH_DELTA_RULES = ("qwen 3 next", "qwen 3.5", "kimi linear")  # beginnings of families' names
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


class Case(NamedTuple):
    """family: of `family_models.CASES`, or of `test_multimodal.MODELS`. lora: of peft's LoraConfig. tokens:
    added to the vocabulary. steps: those of AdamW on one batch in peft."""

    family: str
    lora: dict[str, Any]
    tokens: int = 0
    changes: dict[str, Any] = {}
    steps: int = 0


ALL: dict[str, Any] = {"target_modules": "all-linear"}
NEOX_COPIES = {"modules_to_save": ["embed_in", "lm_head"]}
NEOX_LINEARS = {"target_modules": ["query_key_value", "dense", "dense_4h_to_h"]}
TIED = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
CASES: dict[str, Case] = {
    "gpt_neox": Case("gpt_neox", ALL),
    "gpt_neox rslora copies": Case("gpt_neox", {**NEOX_LINEARS, **NEOX_COPIES, "use_rslora": True}),
    "gpt_neox dora": Case("gpt_neox sequential", {**ALL, "use_dora": True}),
    "gpt_neox tied": Case("gpt_neox no bias", {**NEOX_COPIES, "target_modules": ["query_key_value"]}),
    "llama attention": Case("llama 3", {**ATTENTION, "use_rslora": True}),
    "llama dora": Case("llama 3", {**ALL, "use_dora": True}), "llama added tokens": Case("llama 2", ALL, 3),
    "llama tied added tokens": Case("llama linear", TIED, 4), "mixtral attention": Case("mixtral", ATTENTION),
    "qwen 2 moe attention": Case("qwen 2 moe windows", {**ATTENTION, "use_dora": True}),
    "gpt oss attention": Case("gpt oss", ATTENTION),
    "flex olmo attention": Case("flex olmo", ATTENTION), "minimax m2 attention": Case("minimax m2", ATTENTION),
    "solar open attention": Case("solar open", ATTENTION), "granite moe attention": Case("granite moe", ATTENTION),
    "exaone moe attention": Case("exaone moe", ATTENTION),
    "ernie moe attention": Case("ernie 4.5 moe", ATTENTION), "hunyuan moe attention": Case("hunyuan moe", ATTENTION),
    "llama copies": Case("llama wide", {**ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"], "use_dora": True}),
}  # fmt: skip
OTHER_FAMILIES = [
    *("mistral", "qwen 3", "smollm 3", "olmo 2", "olmo 3", "gemma 3", "gpt 2", "qwen 2", "olmo 1", "gemma 2", "phi 3"),
    *("phi 3 short", "ministral 3", "granite", "glm 4", "cohere 2", "starcoder 2", "apertus", "seed oss"),
    *("gemma 1", "arcee", "cwm", "ernie 4.5", "exaone 4", "glm", "helium", "stablelm", "nemotron"),
    *("hunyuan", "falcon", "ministral"),
]
# Of a multimodal model the vision tower has modules of the same names.
LANGUAGE_MODEL_TARGETS = {"target_modules": r".*language_model\..*\.(q_proj|k_proj|o_proj|gate_proj|down_proj)"}
CASES |= {
    "gemma 3 inside copies": Case(
        "gemma3", {**LANGUAGE_MODEL_TARGETS, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, steps=2
    ),
    "ministral 3 inside dora": Case("mistral3", {**LANGUAGE_MODEL_TARGETS, "use_dora": True}, steps=2),
    "mistral inside": Case("mistral3 with mistral", LANGUAGE_MODEL_TARGETS, steps=2),
    "nemotron h": Case("nemotron h", {"target_modules": [*ATTENTION["target_modules"], "mixer.up_proj"]}, steps=2),
    "nemotron h dora": Case("nemotron h latent", {**ATTENTION, "use_dora": True}, steps=2),
}  # fmt: skip
# Where they stand and how large they are: peft's patterns, layers, and a name in one block alone.
SIZES: dict[str, Any] = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 2, "v_proj": 6},
    "alpha_pattern": {r".*\.1\..*k_proj": 3},
}
LAYER_1 = {"layers_to_transform": [1], "layers_pattern": "h"}
CASES |= {
    "llama sizes": Case("llama 3", {**ALL, **SIZES}, steps=2),
    "gpt_neox dora sizes": Case("gpt_neox", {
        **NEOX_LINEARS, "use_dora": True, "use_rslora": True, "rank_pattern": {"attention.dense": 3},
        "alpha_pattern": {"query_key_value": 2},
    }, steps=2),
    "gpt 2 places": Case("gpt 2", {"target_modules": ["c_attn", "mlp.c_proj"], **LAYER_1}, steps=2),
    "llama places": Case("llama 3", {
        "target_modules": r".*\.(0\.self_attn\.[qk]_proj|1\.mlp\.down_proj)", "rank_pattern": {"k_proj": 2},
    }, steps=2),
    "gemma 3 inside places": Case("gemma3", {
        "target_modules": r".*language_model\..*\.0\..*(q_proj|down_proj)", "rank_pattern": {"down_proj": 2},
    }, steps=2),
}  # fmt: skip
COPIED_HEAD = {"modules_to_save": ["wte", "lm_head"], "ensure_weight_tying": True}
CASES |= {
    "gpt 2 copies": Case("gpt 2", {"target_modules": ["c_attn"], **COPIED_HEAD}, steps=2),
    "nemotron h copies": Case("nemotron h", {**ATTENTION, "modules_to_save": ["embeddings", "lm_head"]}, steps=2),
}
# Mamba's projections and shared experts, whose modules have names of others in the same family.
SHARED = {"target_modules": ["in_proj", "q_proj", "shared_experts.up_proj", "shared_experts.down_proj"]}
CASES |= {
    "qwen 2 moe shared": Case("qwen 2 moe", {"target_modules": ["q_proj", "up_proj", "down_proj"]}, steps=2),
    "nemotron h shared": Case("nemotron h", SHARED, steps=2),
    "mamba 2": Case("mamba 2", {"target_modules": ["in_proj"], "use_dora": True}, steps=2),
    "lfm 2": Case("lfm 2", {"target_modules": ["in_proj", "q_proj", "w1", "w2"]}, steps=2),
    "lfm 2 out": Case("lfm 2 biases", {"target_modules": ["in_proj", "self_attn.out_proj"]}, steps=2),
    "granite 4": Case("granite 4 dense", {"target_modules": ["in_proj", "q_proj", "output_linear"]}, steps=2),
    "falcon mamba": Case("falcon mamba", {"target_modules": ["in_proj", "x_proj"]}, steps=2),
}
# Delta rules and latent attention; experts and routers are left out.
NET = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
NET_35 = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
KIMI = ["b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "q_proj", "k_proj", "v_proj", *LATENT[2:]]
CASES |= {
    "qwen 3 next": Case("qwen 3 next", {"target_modules": [*NET, "q_proj"]}, steps=2),
    "qwen 3 next dora": Case("qwen 3 next wide", {"target_modules": NET[:2], "use_dora": True}, steps=2),
    "qwen 3.5": Case("qwen 3.5", {**ALL, "rank_pattern": {"linear_attn.in_proj_z": 2}}, steps=2),
    "qwen 3.5 dora": Case("qwen 3.5 wide", {**ALL, "use_dora": True}, steps=2),
    "qwen 3.5 moe": Case("qwen 3.5 moe", {"target_modules": NET_35}, steps=2),
    "kimi linear": Case("kimi linear", {
        "target_modules": KIMI, "rank_pattern": {r"self_attn\.k_proj": 2, "forget_gate.f_a_proj": 3},
    }, steps=2),
    "kimi linear dora": Case("kimi linear dense", {"target_modules": KIMI, "use_dora": True}, steps=2),
    "deepseek 3": Case("deepseek 3", {"target_modules": LATENT}, steps=2),
    "deepseek 3 dora": Case("deepseek 3 halves", {
        "target_modules": ["q_proj", *LATENT[2:]], "use_dora": True,
    }, steps=2),
    "deepseek 2": Case("deepseek 2", {"target_modules": LATENT[1:3]}, steps=2),
    "youtu": Case("youtu", ALL, steps=2), "minicpm 3": Case("minicpm 3", ALL, steps=2),
    "glm 4 moe lite": Case("glm 4 moe lite", {"target_modules": LATENT}, steps=2),
}  # fmt: skip
for _family in OTHER_FAMILIES:
    CASES |= {f"{_family} lora": Case(_family, ALL), f"{_family} dora": Case(_family, {**ALL, "use_dora": True})}


@torch.no_grad()
def trained(folder: Path, case: Case) -> Tensor:
    """Write `folder/model`, and `folder/peft`: what peft saves of an adapter. Returns peft's logits."""
    if case.family in MULTIMODAL:
        multimodal_folder(folder / "model", case.family, torch.float32)
    else:
        random_model(case.family, **case.changes).save_pretrained(folder / "model")
    model = load_base_model(folder / "model")
    if case.tokens:
        model.resize_token_embeddings(VOCAB + case.tokens)
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False, **case.lora)
    tuned = peft.get_peft_model(model, config).eval()
    for name, param in tuned.named_parameters():
        if "modules_to_save" in name or "magnitude" in name:
            param.mul_(1 + 0.2 * torch.randn_like(param))
    if model.config.tie_word_embeddings and "modules_to_save" in case.lora:
        embedding, head = tuned.get_input_embeddings(), tuned.get_output_embeddings()
        head.modules_to_save.default.weight.copy_(embedding.modules_to_save.default.weight)
    take_steps(tuned, case.steps)
    tuned.save_pretrained(str(folder / "peft"))
    return tuned(TOKENS).logits


def take_steps(tuned: Any, count: int) -> None:
    optimizer = torch.optim.AdamW([param for param in tuned.parameters() if param.requires_grad], lr=1e-2)
    for _ in range(count):
        with torch.enable_grad():
            tuned(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def load_base_model(path: Path) -> Any:
    """A model of transformers, without an adapter."""
    is_multimodal = json.loads((path / "config.json").read_text())["model_type"] in TEXT_TOWERS
    auto = transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, attn_implementation="eager")


def merged_logits(merged: Path) -> Tensor:
    args, _ = load_checkpoint_args(merged)
    assert args.lora is None
    return neox_logits(args, lambda n: load_weights(merged, args, layers=[n], tensor_rank=0, tensor_size=1)[n], TOKENS)


@torch.no_grad()
def logits_with_peft(model: Path, adapter: Path, tokens: int = 0) -> Tensor:
    """The logits of a folder in peft's format, as peft opens it."""
    base = load_base_model(model)
    if tokens:
        base.resize_token_embeddings(VOCAB + tokens)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tuned = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    assert not [warning for warning in warned if "missing" in str(warning.message).lower()], warned
    return tuned(TOKENS).logits


def furthest(actual: Tensor, expected: Tensor) -> float:
    assert expected.std() > 0.3
    return (actual[..., : expected.shape[-1]] - expected).abs().max().item()


ORDINARY_CASES = {
    "gpt_neox rslora copies", "llama dora", "nemotron h", "llama sizes", "gpt 2 copies", "gemma 3 inside copies",
    "qwen 3 next", "kimi linear",
}  # fmt: skip
MORE_CASES = {
    "lfm 2", "granite 4", "gpt oss attention", "qwen 2 moe shared", "falcon mamba", "nemotron h shared",
    "gpt_neox tied",
    "deepseek 3", "qwen 3.5 dora",
}  # fmt: skip


@pytest.mark.parametrize("name", with_more(CASES, *MORE_CASES, product=CASES.keys() - ORDINARY_CASES - MORE_CASES))
def test_peft_both_ways(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    bound = BOUND * (DELTA_FACTOR if name.startswith(WITH_DELTA_RULES) else 1)
    peft_logits = trained(tmp_path, case)
    base_logits = load_base_model(tmp_path / "model")(TOKENS).logits
    assert (base_logits - peft_logits[..., : base_logits.shape[-1]]).abs().max() > 0.1, "it does nothing"
    base, (source,) = open_with_base([tmp_path / "peft"])
    assert furthest(unmerged_logits(base, source, TOKENS), peft_logits) < bound
    compare_merged(base, source)
    compare_with_peft(base, source)

    adapters = write_adapters(base, source, tmp_path / "ours")
    base, (reopened,) = open_with_base([adapters])
    assert furthest(unmerged_logits(base, reopened, TOKENS), peft_logits) < bound
    export_peft(reopened, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    assert config["fan_in_fan_out"] == (case.family == "gpt 2")
    assert furthest(logits_with_peft(tmp_path / "model", tmp_path / "out", case.tokens), peft_logits) < bound
    written, published = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "peft"))
    assert {key for key in published if ".lora_" in key} == {key for key in written if ".lora_" in key}
    assert all(value.equal(published[key]) for key, value in written.items() if key in published)

    merged, _ = write_merged(base, [(reopened, 1.0)], tmp_path / "merged")
    assert furthest(merged_logits(merged), peft_logits) < bound
    export_hf(merged, load_checkpoint_args(merged)[0], tmp_path / "hf", tokenizer=False)
    with torch.no_grad():
        assert furthest(load_base_model(tmp_path / "hf")(TOKENS).logits, peft_logits) < bound


@pytest.mark.product
def test_every_layout(tmp_path: Path) -> None:
    names = ("gpt_neox rslora copies", "gpt_neox dora", "llama dora", "llama attention", "llama tied added tokens")
    models, expected = [], []
    for name in names:
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        expected.append(trained(folder, CASES[name]))
        base, (source,) = open_with_base([folder / "peft"])
        weights = {n: {**base.read(n), **source.read(n)} for n in range(source.args.num_layers + 5)}
        models.append((source.args.user_values, {n: tensors for n, tensors in weights.items() if tensors}))
    for layout, logits in logits_by_layout(models, [(2, 1), (1, 2), (2, 2)]).items():
        for name, neox_logits_of_layout, peft_logits in zip(names, logits, expected, strict=True):
            assert furthest(neox_logits_of_layout, peft_logits) < BOUND, (name, layout)


def refusal(folder: Path, **fields: Any) -> str:
    """Returns the message that refuses `folder/peft` with other fields in its adapter_config.json."""
    file = folder / "peft" / "adapter_config.json"
    original = file.read_text()
    file.write_text(json.dumps({**json.loads(original), **fields}))
    message = fails(".", open_with_base, [folder / "peft"])
    file.write_text(original)
    return message


def test_what_has_no_counterpart_is_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path, CASES["llama added tokens"]._replace(tokens=0))
    for field, value in {
        "bias": "all",
        "peft_type": "LOHA", "init_lora_weights": "pissa", "trainable_token_indices": [1],
        "lora_bias": True, "task_type": "TOKEN_CLS", "never_heard_of": 1,
    }.items():  # fmt: skip
        assert f"{field}: " in refusal(tmp_path, **{field: value}), field
    assert "layers.0.self_attn.q_proj.lora_A.weight: has shape (4, 32), expected (2, 32)" in refusal(
        tmp_path, rank_pattern={"q_proj": 2}
    )
    assert "unknown tensor base_model.model.model.layers.1." in refusal(tmp_path, layers_to_transform=[0])
    assert "base_model_name_or_path" not in refusal(tmp_path, base_model_name_or_path=str(tmp_path / "gone"))

    file = tmp_path / "peft" / "adapter_model.safetensors"
    tensors, name = load_file(file), "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    assert f"missing tensor {name}" in refusal(tmp_path)
    save_file({**tensors, name: tensors[name][:, :8].contiguous()}, file)
    assert re.search(re.escape(name) + r".* \(4, 8\).* \(4, 32\)", refusal(tmp_path))
    save_file({**tensors, "base_model.model.model.norm.weight": torch.ones(32)}, file)
    assert "norm" in refusal(tmp_path)
    save_file({**tensors, name.replace("q_proj", "k_projector"): tensors[name].clone()}, file)
    assert "k_projector: " in refusal(tmp_path)


def test_a_folder_of_an_older_peft(tmp_path: Path) -> None:
    """Older versions wrote the tensors with `torch.save`."""
    peft_logits, file = trained(tmp_path, CASES["llama places"]), tmp_path / "peft" / "adapter_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    base, (source,) = open_with_base([tmp_path / "peft"])
    assert furthest(unmerged_logits(base, source, TOKENS), peft_logits) < BOUND
    file.with_suffix(".bin").unlink()
    fails("no weights: adapter_model.safetensors", open_with_base, [tmp_path / "peft"])


def test_adapters_of_the_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    """peft keeps the weights below these beside them, which says nothing to who reads of a `base_layer`."""
    for family, field in (("llama linear", "tie_word_embeddings"), ("llama 3", "lm_head")):
        (tmp_path / field).mkdir()
        trained(tmp_path / field, Case(family, {"target_modules": ["q_proj", "lm_head"]}))
        with pytest.raises(CheckpointError, match="adapters of lm_head are not supported.*modules_to_save") as caught:
            open_with_base([tmp_path / field / "peft"])
        assert field in str(caught.value) and "base_layer" not in str(caught.value)


def test_one_a_for_all_rows_of_queries_keys_and_values(tmp_path: Path) -> None:
    """GPT-NeoX's adapter in LLaMA's families: each module has the A, and its rows of B. Not the other way."""
    random_model("llama 2").save_pretrained(tmp_path / "model")
    random_model("gpt_neox").save_pretrained(tmp_path / "neox")
    for model, target in (("model", "query_key_value"), ("neox", "q_proj")):
        base = open_base(tmp_path / model)
        args = base.args.replace(lora={"r": 4, "alpha": 8, "dora": model == "model", "target": [target]})
        torch.manual_seed(0)
        values = {layer: {spec.name: 0.2 + 0.1 * torch.randn(spec.shape) for spec in specs}
                  for layer, specs in adapter_params(args).items()}  # fmt: skip
        source = AdapterSource(tmp_path, args, lambda layer, values=values: values.get(layer, {}))
        if model == "neox":
            fails("q_proj: .* gpt_neox.*query_key_value", export_peft, source, tmp_path / "no")
            continue
        export_peft(source, tmp_path / "out", base=str(tmp_path / model))
        unmerged = unmerged_logits(base, source, TOKENS)
        assert furthest(unmerged, logits_with_peft(tmp_path / model, tmp_path / "out")) < BOUND * unmerged.abs().max()


def test_adapters_of_qwen_3_next_in_qwen_3_5(tmp_path: Path) -> None:
    """Qwen 3.5 divides the same rows among more modules: each has the A, its rows of B. Not the other way."""
    for case, target in (("qwen 3.5", [*NET, "o_proj"]), ("qwen 3 next", ["in_proj_z"])):
        folder = tmp_path / case.replace(" ", "")
        random_model(case).save_pretrained(folder)
        base = open_base(folder)
        args = base.args.replace(lora={"r": 4, "alpha": 8, "dora": True, "target": target})
        torch.manual_seed(0)
        values = {layer: {spec.name: 0.2 + 0.1 * torch.randn(spec.shape) for spec in specs}
                  for layer, specs in adapter_params(args).items()}  # fmt: skip
        source = AdapterSource(tmp_path, args, lambda layer, values=values: values.get(layer, {}))
        if case == "qwen 3 next":
            fails(
                "in_proj_z: .* qwen3_next.*in_proj_qkvz.*in_proj_qkvz, in_proj_ba", export_peft, source, tmp_path / "no"
            )
            continue
        export_peft(source, tmp_path / "out", base=str(folder))
        unmerged = unmerged_logits(base, source, TOKENS)
        assert furthest(unmerged, logits_with_peft(folder, tmp_path / "out")) < DELTA_FACTOR * BOUND


def test_sums_of_several(tmp_path: Path) -> None:
    """As peft's `add_weighted_adapter` by concatenation, and of DoRA what each changes alone."""
    for name, overrides in {"one": {}, "two": {"use_rslora": True}}.items():
        (tmp_path / name).mkdir()
        torch.manual_seed(len(name))
        trained(tmp_path / name, Case("llama 2", {"target_modules": "all-linear", **overrides}))
    weights = {"one": 0.7, "two": -0.4}
    base, sources = open_with_base([tmp_path / name / "peft" for name in weights], tmp_path / "one" / "model")
    merged, compared = write_merged(base, list(zip(sources, weights.values(), strict=True)), tmp_path / "sum")
    assert len(compared) == 2
    model = load_base_model(tmp_path / "one" / "model")
    tuned = peft.PeftModel.from_pretrained(model, str(tmp_path / "one" / "peft"), adapter_name="one")
    tuned.load_adapter(str(tmp_path / "two" / "peft"), adapter_name="two")
    tuned.add_weighted_adapter(list(weights), list(weights.values()), "sum", combination_type="cat")
    tuned.set_adapter("sum")
    with torch.no_grad():
        assert furthest(merged_logits(merged), tuned.eval()(TOKENS).logits) < BOUND


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    trained(tmp_path, CASES["llama dora"])
    folder, base_folder = HFFolder(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "base"
    import_hf(folder, base_folder)
    base, (source,) = open_with_base([tmp_path / "peft"], base_folder)
    adapters = write_adapters(base, source, tmp_path / "ours")
    path, (comparison,) = write_merged(base, [(source, 1.0)], tmp_path / "merged")
    assert comparison.stored is not None and comparison.difference < BOUND * 10 < comparison.stored < 0.3
    args, facts = load_checkpoint_args(path)
    assert facts.dtypes == {torch.bfloat16} and args.precision == "bfloat16"

    (tmp_path / "other").mkdir()
    import_hf(HFFolder(tmp_path / "model"), tmp_path / "other")
    fails("trained on other weights than .*other", open_with_base, [adapters], tmp_path / "other")
    fails("adapters alone, .*base/global_step0", load_checkpoint_args, adapters)
    assert read_manifest(adapters).base["path"] == str(find_checkpoint(base_folder).resolve())  # type: ignore
    assert read_manifest(adapters).iteration == 0  # type: ignore[union-attr]


def test_names_of_a_multimodal_model_in_either_way(tmp_path: Path) -> None:
    """As files are published, which older transformers had in memory; what text leaves untrained."""
    peft_logits = trained(tmp_path, CASES["mistral inside"])
    file = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(file)
    in_memory, published = "base_model.model.model.language_model.", "base_model.model.language_model.model."
    tower = "base_model.model.model.vision_tower.transformer.layers.0.attention.q_proj"
    renamed = {name.replace(in_memory, published): value for name, value in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    unseen = {f"{tower}.lora_A.weight": torch.ones(4, 16), f"{tower}.lora_B.weight": torch.zeros(16, 4)}
    for stored in (renamed, {**tensors, **unseen}):
        save_file(stored, file)
        base, (source,) = open_with_base([tmp_path / "peft"])
        assert furthest(unmerged_logits(base, source, TOKENS), peft_logits) < BOUND
    save_file({**tensors, **unseen, f"{tower}.lora_B.weight": torch.ones(16, 4)}, file)
    fails(re.escape(tower), open_with_base, [tmp_path / "peft"])
    save_file(tensors, file)

    # The names of the language model alone, over the multimodal folder.
    base, (source,) = open_with_base([tmp_path / "peft"])
    export_peft(source, tmp_path / "text", base=str(tmp_path / "model"), family="mistral")
    written = load_file(tmp_path / "text" / "adapter_model.safetensors")
    assert written.keys() == {name.replace(in_memory, "base_model.model.model.") for name in tensors}
    base, (text,) = open_with_base([tmp_path / "text"])
    compare_with_peft(base, text)


def test_names_of_a_hybrid_as_its_files_have_them(tmp_path: Path) -> None:
    """Adapters that were trained on the code of a published folder."""
    peft_logits = trained(tmp_path, CASES["nemotron h"])
    file = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(file)
    renamed = {name.replace(".model.model.", ".model.backbone."): value for name, value in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    save_file(renamed, file)
    base, (source,) = open_with_base([tmp_path / "peft"])
    assert furthest(unmerged_logits(base, source, TOKENS), peft_logits) < BOUND
    export_peft(source, tmp_path / "out", base=str(tmp_path / "model"))
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == tensors.keys()
