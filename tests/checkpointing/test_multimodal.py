"""The language model out of a multimodal folder and back, with the rest carried along bit for bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.checkpointing import CheckpointError, read_manifest
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.families.multimodal import text_config
from megatron.checkpointing.huggingface import HFFolder, declared_eos_ids, export_hf, read_companion_files
from megatron.checkpointing.huggingface.carried_tensors import CARRIED, carried_writer
from tests.checkpointing.test_huggingface import imported, same_bits, tensors_of, there_and_back
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, config, run_to_end

_SIZES: dict[str, Any] = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 48,
                          "max_position_embeddings": 32}  # fmt: skip
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 14}  # fmt: skip
_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
         "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    text = transformers.Gemma3TextConfig(**_SIZES, sliding_window=5, layer_types=kinds)
    config = transformers.Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=1)
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3(text: Any) -> Any:
    vision = transformers.PixtralVisionConfig(**_VISION)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config)


_MROPE = {"rope_type": "default", "rope_theta": 777.0, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
_SECTIONS = {"rope_type": "default", "rope_theta": 777.0, "mrope_section": [2, 1, 1]}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
          "linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"],
          "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5}}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                 "shared_expert_intermediate_size": 10}  # fmt: skip
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32,
                "num_position_embeddings": 16}  # fmt: skip

_QWEN2_VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 1}


def qwen(name: str, vision: dict[str, Any] = _QWEN_VISION, **text: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(text_config={**_SIZES, **text}, vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config)


def llava(name: str, text: Any) -> Any:
    vision = transformers.CLIPVisionConfig(**_VISION, projection_dim=8)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config)


def gemma4(name: str, **text: Any) -> Any:
    kinds = ["sliding_attention", "full_attention"]
    text_config = {**_SIZES, "layer_types": kinds, "sliding_window": 5, "global_head_dim": 10, **text}
    vision = {**_VISION, "head_dim": 8, "num_key_value_heads": 2} if name == "Gemma4" else {"mm_embed_dim": 16}
    config = getattr(transformers, f"{name}Config")(text_config=text_config, vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config)


MODELS = {
    "gemma4": lambda: gemma4("Gemma4", attention_k_eq_v=True, hidden_size_per_layer_input=0),
    "gemma4_unified": lambda: gemma4("Gemma4Unified"),
    "gemma3": gemma3,
    "mistral3": lambda: mistral3(transformers.Ministral3Config(**_SIZES, rope_parameters=_ROPE)),
    "mistral3 with mistral": lambda: mistral3(transformers.MistralConfig(**_SIZES, sliding_window=None)),  # Small 3.1
    "qwen3_vl": lambda: qwen("Qwen3VL", rope_parameters=_MROPE),
    "llava": lambda: llava("Llava", transformers.LlamaConfig(**_SIZES)),
    "llava_next with mistral": lambda: llava("LlavaNext", transformers.MistralConfig(**_SIZES, sliding_window=None)),
    "llava_onevision": lambda: llava("LlavaOnevision", transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen2_vl": lambda: qwen("Qwen2VL", _QWEN2_VISION, head_dim=8, rope_parameters=_SECTIONS),
    "qwen2_5_vl": lambda: qwen("Qwen2_5_VL", _QWEN_VISION, head_dim=8, rope_parameters=_SECTIONS),
    "qwen3_5": lambda: qwen("Qwen3_5", **_DELTA),
    "qwen3_5_moe": lambda: qwen("Qwen3_5Moe", **_DELTA, **_QWEN_EXPERTS),
}


def folder(path: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(3)
    model = MODELS[kind]().to(dtype).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", kind)
    checkpoint, args = imported(path, tmp_path / "run")
    export_hf(checkpoint, args, tmp_path / "back")
    original = tensors_of(path)
    assert same_bits(tensors_of(tmp_path / "back"), original)
    assert any(name.startswith(("vision_tower.", "model.v", "visual.", "model.embed_vision.")) for name in original)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((path / "config.json").read_text())
    text = export_hf(checkpoint, args, tmp_path / "text", family=HFFolder(path).config["model_type"])
    assert text is not None and text.difference <= text.bound
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    multimodal = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    tokens = torch.arange(5, 25).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, multimodal(input_ids=tokens).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_fields_outside_text_config_as_published(kind: str, tmp_path: Path) -> None:
    """Logits are compared with those of transformers, which reads both forms."""
    path = folder(tmp_path / "model", kind)
    nested = json.loads((path / "config.json").read_text())
    text = {name: value for name, value in nested.pop("text_config").items() if name not in ("head_dim", "model_type")}
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    published = {**text, **nested}
    (path / "config.json").write_text(json.dumps(published))
    checkpoint, args = imported(path, tmp_path / "run")
    assert (args.rotary_emb_base, args.rope_scaling) == (777, None)
    export_hf(checkpoint, args, tmp_path / "back")
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(path))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == published
    (checkpoint / "manifest.json").unlink()
    export_hf(checkpoint, args.replace(rms_norm_epsilon=0.1), tmp_path / "changed", check=False)
    changed = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert changed["rms_norm_eps"] == 0.1 and "text_config" not in changed and changed["vision_config"]


def test_fields_of_a_language_model_without_a_type_of_its_own() -> None:
    """Qwen3-VL's is Qwen 3 with other defaults; a field beside text_config ties the head."""
    full = transformers.Qwen3VLConfig().to_dict()
    minimal = {"model_type": "qwen3_vl", "text_config": {}, "tie_word_embeddings": True}
    expected, actual = (from_hf(text_config(config), lambda name: None)[0] for config in (full, minimal))
    assert actual == {**expected, "no_weight_tying": False} and expected["rotary_emb_base"] == 500000


def test_names_as_in_memory_and_other_dtypes(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "gemma3")
    tensors = load_file(path / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "model.language_model.")
        if name.startswith("language_model.") else f"model.{name}": value.clone()
        for name, value in tensors.items()
    }  # fmt: skip
    odd = "model.multi_modal_projector.mm_soft_emb_norm.weight"
    renamed[odd] = renamed[odd].float()
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    assert same_bits(there_and_back(path, tmp_path), renamed)


def test_ends_of_texts_are_those_of_the_whole(tmp_path: Path) -> None:
    """As in transformers, where those of the part count where the whole has none."""
    path = folder(tmp_path / "model", "gemma3")
    for top_level_ids, text_ids, expected in (([1, 106], 1, (1, 106)), (None, [1, 3], (1, 3))):
        raw = json.loads((path / "config.json").read_text())
        raw["eos_token_id"], raw["text_config"]["eos_token_id"] = top_level_ids, text_ids
        (path / "config.json").write_text(json.dumps(raw))
        (path / "generation_config.json").unlink(missing_ok=True)
        assert declared_eos_ids(read_companion_files(path)) == expected
        hf_generation = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(path))
        assert tuple(hf_generation.eos_token_id) == expected
        place = tmp_path / f"of_{len(expected)}_{text_ids}"
        place.mkdir()
        there_and_back(path, place)
        back = json.loads((place / "back" / "config.json").read_text())
        assert (back["eos_token_id"], back["text_config"]["eos_token_id"]) == (top_level_ids, text_ids)


def test_a_tied_head_that_is_in_the_file_is_none(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "gemma3")
    tensors = load_file(path / "model.safetensors")
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert not imported(path, tmp_path / "run")[1].no_weight_tying


def test_carried_tensors_are_one_file_and_outlive_their_source(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "gemma3")
    write = carried_writer(path, True)
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    record = write(tmp_path / "a" / CARRIED, "x")
    shutil.rmtree(path)
    assert write(tmp_path / "b" / CARRIED, "y") == replace(record, name="y")
    assert (tmp_path / "a" / CARRIED).samefile(tmp_path / "b" / CARRIED)
    content = (tmp_path / "a" / CARRIED).read_bytes()
    rewrite = carried_writer(tmp_path / "b", False)
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)
    for name in ("c", "d"):  # no name of it is left: copies
        assert rewrite(tmp_path / name / CARRIED, "x") == record and (tmp_path / name / CARRIED).read_bytes() == content
        shutil.rmtree(tmp_path / name)


@pytest.mark.parametrize("import_first", [True, False])
def test_training_carries_the_rest(import_first: bool, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "gemma3", torch.float32)
    source = imported(path, tmp_path / "run")[0].parent if import_first else path
    opened = HFFolder(path)
    keys = {key: value for key, value in from_hf(opened.config, opened.get)[0].items() if key != "padded_vocab_size"}
    values = config(keys, {"save": str(tmp_path / "trained"), "load": str(source), "train_iters": 2,
                           "checkpoint_factor": 1, "keep_last_n_checkpoints": 1,
                           "vocab_file": str(GOLDEN / "dataset" / "hf_tokenizer"), "save_hf": 2})  # fmt: skip
    run_ranks(run_to_end, 1, values)
    last = tmp_path / "trained" / "global_step2"
    manifest = read_manifest(last)
    assert manifest is not None and "huggingface/carried.safetensors" in manifest.files
    original = load_file(path / "model.safetensors")
    exported = tmp_path / "trained" / "huggingface" / "global_step2"
    trained = load_file(exported / "model.safetensors")
    assert original.keys() == trained.keys()
    for name, value in original.items():
        assert trained[name].equal(value) == (not name.startswith("language_model.")), name
    _, info = transformers.AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_other_language_models_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "mistral3")
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["model_type"] = "qwen2"
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="qwen2 .*mistral3, only mistral, ministral3"):
        HFFolder(path)


def test_quantised_as_published(tmp_path: Path) -> None:
    """Ministral 3's folders: FP8 with one scale a matrix in the language model alone, bf16 in all else."""
    path = folder(tmp_path / "model", "mistral3")
    tensors, packed = load_file(path / "model.safetensors"), {}
    for name, value in tensors.items():
        if not name.startswith("language_model.model.layers.") or value.dim() < 2:
            packed[name] = value
            continue
        scale = value.float().abs().max() / 448
        packed[name] = (value.float() / scale).to(torch.float8_e4m3fn)
        packed[name.replace(".weight", ".weight_scale_inv")] = scale.to(torch.bfloat16)
        packed[name.replace(".weight", ".activation_scale")] = torch.tensor(1.0, dtype=torch.bfloat16)
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    (path / "config.json").write_text(json.dumps(raw))
    exported = there_and_back(path, tmp_path)
    assert exported.keys() == tensors.keys() and all(value.dtype == torch.bfloat16 for value in exported.values())
    for name, value in tensors.items():
        close = name.startswith("language_model.model.layers.") and value.dim() == 2
        torch.testing.assert_close(exported[name], value, rtol=0.07 if close else 0, atol=1e-3 if close else 0)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
