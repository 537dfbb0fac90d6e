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
from megatron.checkpointing.adapters import AdapterSource, export_peft, open_adapter, open_base, open_with_base
from megatron.checkpointing.adapters.exporting import compare_with_peft
from megatron.checkpointing.adapters.merging import compare_merged, unmerged_logits, write_adapters, write_merged
from megatron.checkpointing.families import TEXT_TOWERS
from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf
from megatron.checkpointing.huggingface.logit_check import our_logits
from megatron.model.weight_map import adapter_params
from tests.checkpointing.family_models import VOCAB, random_model
from tests.checkpointing.family_runs import TOKENS, logits_by_layout
from tests.checkpointing.golden import fails
from tests.checkpointing.test_multimodal import MODELS as MULTIMODAL
from tests.checkpointing.test_multimodal import folder as multimodal_folder
from tests.marks import with_more

BOUND = 2e-5  # absolute, of fp32 logits of order 1
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
    "llama copies": Case("llama wide", {**ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"], "use_dora": True}),
}  # fmt: skip
FIRST: tuple[str, ...] = ("gpt_neox rslora copies", "gpt_neox tied", "llama dora", "llama tied added tokens")
MORE: tuple[str, ...] = (
    "llama attention",
    "llama copies",
    "qwen 2 moe attention",
    "gpt oss attention",
    "gpt 2 lora",
    "phi 3 dora",
)
OTHERS = [
    *("mistral", "qwen 3", "smollm 3", "olmo 2", "olmo 3", "gemma 3", "gpt 2", "qwen 2", "olmo 1", "gemma 2", "phi 3"),
    *("phi 3 short", "ministral 3", "granite", "glm 4", "cohere 2", "starcoder 2", "apertus", "seed oss"),
]
# Of a multimodal model the vision tower has modules of the same names.
INSIDE = {"target_modules": r".*language_model\..*\.(q_proj|k_proj|o_proj|gate_proj|down_proj)"}
CASES |= {
    "gemma 3 inside copies": Case(
        "gemma3", {**INSIDE, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, steps=2
    ),
    "ministral 3 inside dora": Case("mistral3", {**INSIDE, "use_dora": True}, steps=2),
    "mistral inside": Case("mistral3 with mistral", INSIDE, steps=2),
    "nemotron h": Case("nemotron h", {"target_modules": [*ATTENTION["target_modules"], "mixer.up_proj"]}, steps=2),
    "nemotron h dora": Case("nemotron h latent", {**ATTENTION, "use_dora": True}, steps=2),
}  # fmt: skip
FIRST += ("gemma 3 inside copies", "nemotron h")
MORE += ("ministral 3 inside dora", "mistral inside", "nemotron h dora")
for _family in OTHERS:
    CASES |= {f"{_family} lora": Case(_family, ALL), f"{_family} dora": Case(_family, {**ALL, "use_dora": True})}


@torch.no_grad()
def trained(folder: Path, case: Case) -> Tensor:
    """Write `folder/model`, and `folder/peft`: what peft saves of an adapter. Returns peft's logits."""
    if case.family in MULTIMODAL:
        multimodal_folder(folder / "model", case.family, torch.float32)
    else:
        random_model(case.family, **case.changes).save_pretrained(folder / "model")
    model = alone(folder / "model")
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


def alone(path: Path) -> Any:
    """A model of transformers, without an adapter."""
    is_whole = json.loads((path / "config.json").read_text())["model_type"] in TEXT_TOWERS
    auto = transformers.AutoModelForImageTextToText if is_whole else transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, attn_implementation="eager")


def merged_logits(merged: Path) -> Tensor:
    args, _ = load_checkpoint_args(merged)
    assert args.lora is None
    return our_logits(args, lambda n: load_weights(merged, args, layers=[n], tensor_rank=0, tensor_size=1)[n], TOKENS)


@torch.no_grad()
def by_peft(model: Path, adapter: Path, tokens: int = 0) -> Tensor:
    """The logits of a folder in peft's format, as peft opens it."""
    base = alone(model)
    if tokens:
        base.resize_token_embeddings(VOCAB + tokens)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tuned = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    assert not [one for one in warned if "missing" in str(one.message).lower()], warned
    return tuned(TOKENS).logits


def furthest(ours: Tensor, theirs: Tensor) -> float:
    assert theirs.std() > 0.3
    return (ours[..., : theirs.shape[-1]] - theirs).abs().max().item()


@pytest.mark.parametrize("name", with_more(CASES, *MORE, product=CASES.keys() - {*FIRST, *MORE}))
def test_peft_both_ways(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    theirs = trained(tmp_path, case)
    before = alone(tmp_path / "model")(TOKENS).logits
    assert (before - theirs[..., : before.shape[-1]]).abs().max() > 0.1, "it does nothing"
    base, (source,) = open_with_base([tmp_path / "peft"])
    assert furthest(unmerged_logits(base, source, TOKENS), theirs) < BOUND
    compare_merged(base, source)
    compare_with_peft(base, source)

    made = write_adapters(base, source, tmp_path / "ours")
    base, (again,) = open_with_base([made])
    assert furthest(unmerged_logits(base, again, TOKENS), theirs) < BOUND
    export_peft(again, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    assert config["fan_in_fan_out"] == (case.family == "gpt 2")
    assert furthest(by_peft(tmp_path / "model", tmp_path / "out", case.tokens), theirs) < BOUND
    written, given = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "peft"))
    assert {key for key in given if ".lora_" in key} == {key for key in written if ".lora_" in key}
    assert all(value.equal(given[key]) for key, value in written.items() if key in given)

    merged, _ = write_merged(base, [(again, 1.0)], tmp_path / "merged")
    assert furthest(merged_logits(merged), theirs) < BOUND
    export_hf(merged, load_checkpoint_args(merged)[0], tmp_path / "hf", tokenizer=False)
    with torch.no_grad():
        assert furthest(alone(tmp_path / "hf")(TOKENS).logits, theirs) < BOUND


@pytest.mark.more
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
        for name, ours, theirs in zip(names, logits, expected, strict=True):
            assert furthest(ours, theirs) < BOUND, (name, layout)


def refusal(folder: Path, **fields: Any) -> str:
    """What is said of `folder/peft` with other fields in its adapter_config.json."""
    file = folder / "peft" / "adapter_config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), **fields}))
    said = fails(".", open_with_base, [folder / "peft"])
    file.write_text(before)
    return said


def test_what_has_no_counterpart_is_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path, CASES["llama added tokens"]._replace(tokens=0))
    for field, value in {
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}, "layers_to_transform": [0], "bias": "all",
        "peft_type": "LOHA", "init_lora_weights": "pissa", "trainable_token_indices": [1],
        "lora_bias": True, "task_type": "TOKEN_CLS", "never_heard_of": 1,
    }.items():  # fmt: skip
        assert f"{field}: " in refusal(tmp_path, **{field: value}), field
    assert "base_model_name_or_path" not in refusal(tmp_path, base_model_name_or_path=str(tmp_path / "gone"))

    file = tmp_path / "peft" / "adapter_model.safetensors"
    tensors, name = load_file(file), "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    assert f"missing {name}" in refusal(tmp_path)
    save_file({**tensors, name: tensors[name][:, :8].contiguous()}, file)
    assert re.search(re.escape(name) + r".* \(4, 8\).* \(4, 32\)", refusal(tmp_path))
    save_file({**tensors, "base_model.model.model.norm.weight": torch.ones(32)}, file)
    assert "norm" in refusal(tmp_path)
    save_file({**tensors, name.replace("q_proj", "k_projector"): tensors[name].clone()}, file)
    assert "k_projector: " in refusal(tmp_path)


def test_adapters_of_the_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    """peft keeps the weights below these beside them, which says nothing to who reads of a `base_layer`."""
    for family, named in (("llama linear", "tie_word_embeddings"), ("llama 3", "lm_head")):
        (tmp_path / named).mkdir()
        trained(tmp_path / named, Case(family, {"target_modules": ["q_proj", "lm_head"]}))
        with pytest.raises(CheckpointError, match="adapters of lm_head are not supported.*modules_to_save") as caught:
            open_with_base([tmp_path / named / "peft"])
        assert named in str(caught.value) and "base_layer" not in str(caught.value)


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
            fails("q_proj: gpt_neox .*query_key_value", export_peft, source, tmp_path / "no")
            continue
        export_peft(source, tmp_path / "out", base=str(tmp_path / model))
        ours = unmerged_logits(base, source, TOKENS)
        assert furthest(ours, by_peft(tmp_path / model, tmp_path / "out")) < BOUND * ours.abs().max()


def test_sums_of_several(tmp_path: Path) -> None:
    """As peft's `add_weighted_adapter` by concatenation, and of DoRA what each changes alone."""
    for name, more in {"one": {}, "two": {"use_rslora": True}}.items():
        (tmp_path / name).mkdir()
        torch.manual_seed(len(name))
        trained(tmp_path / name, Case("llama 2", {"target_modules": "all-linear", **more}))
    weights = {"one": 0.7, "two": -0.4}
    base, sources = open_with_base([tmp_path / name / "peft" for name in weights], tmp_path / "one" / "model")
    merged, compared = write_merged(base, list(zip(sources, weights.values(), strict=True)), tmp_path / "sum")
    assert len(compared) == 2
    model = alone(tmp_path / "one" / "model")
    tuned = peft.PeftModel.from_pretrained(model, str(tmp_path / "one" / "peft"), adapter_name="one")
    tuned.load_adapter(str(tmp_path / "two" / "peft"), adapter_name="two")
    tuned.add_weighted_adapter(list(weights), list(weights.values()), "sum", combination_type="cat")
    tuned.set_adapter("sum")
    with torch.no_grad():
        assert furthest(merged_logits(merged), tuned.eval()(TOKENS).logits) < BOUND


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    trained(tmp_path, CASES["llama dora"])
    folder, made = HFFolder(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "base"
    import_hf(folder, made)
    base, (source,) = open_with_base([tmp_path / "peft"], made)
    adapters = write_adapters(base, source, tmp_path / "ours")
    path, (comparison,) = write_merged(base, [(source, 1.0)], tmp_path / "merged")
    assert comparison.stored is not None and comparison.difference < BOUND * 10 < comparison.stored < 0.3
    args, facts = load_checkpoint_args(path)
    assert facts.dtypes == {torch.bfloat16} and args.precision == "bfloat16"

    (tmp_path / "other").mkdir()
    import_hf(HFFolder(tmp_path / "model"), tmp_path / "other")
    fails("trained on other weights than .*other", open_with_base, [adapters], tmp_path / "other")
    fails("adapters alone, .*base/global_step0", load_checkpoint_args, adapters)
    assert read_manifest(adapters).base["path"] == str(find_checkpoint(made).resolve())  # type: ignore
    assert open_adapter(adapters).iteration == 0


def test_names_of_a_multimodal_model_in_either_way(tmp_path: Path) -> None:
    """As files are published, which older transformers had in memory; what text leaves untrained."""
    theirs = trained(tmp_path, CASES["mistral inside"])
    file = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(file)
    inside, published = "base_model.model.model.language_model.", "base_model.model.language_model.model."
    tower = "base_model.model.model.vision_tower.transformer.layers.0.attention.q_proj"
    renamed = {name.replace(inside, published): value for name, value in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    unseen = {f"{tower}.lora_A.weight": torch.ones(4, 16), f"{tower}.lora_B.weight": torch.zeros(16, 4)}
    for stored in (renamed, {**tensors, **unseen}):
        save_file(stored, file)
        base, (source,) = open_with_base([tmp_path / "peft"])
        assert furthest(unmerged_logits(base, source, TOKENS), theirs) < BOUND
    save_file({**tensors, **unseen, f"{tower}.lora_B.weight": torch.ones(16, 4)}, file)
    fails(re.escape(tower), open_with_base, [tmp_path / "peft"])
    save_file(tensors, file)

    # The names of the language model alone, over the multimodal folder.
    base, (source,) = open_with_base([tmp_path / "peft"])
    export_peft(source, tmp_path / "text", base=str(tmp_path / "model"), family="mistral")
    written = load_file(tmp_path / "text" / "adapter_model.safetensors")
    assert written.keys() == {name.replace(inside, "base_model.model.model.") for name in tensors}
    base, (text,) = open_with_base([tmp_path / "text"])
    compare_with_peft(base, text)


def test_names_of_a_hybrid_as_its_files_have_them(tmp_path: Path) -> None:
    """Adapters that were trained on the code of a published folder."""
    theirs = trained(tmp_path, CASES["nemotron h"])
    file = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(file)
    renamed = {name.replace(".model.model.", ".model.backbone."): value for name, value in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    save_file(renamed, file)
    base, (source,) = open_with_base([tmp_path / "peft"])
    assert furthest(unmerged_logits(base, source, TOKENS), theirs) < BOUND
    export_peft(source, tmp_path / "out", base=str(tmp_path / "model"))
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == tensors.keys()
