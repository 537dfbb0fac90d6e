"""A HuggingFace folder with values of other types, or of another format, gives one line and leaves no files.

The line names the file and the field."""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.adapters.peft_folder import PeftFolder
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.families.registry import FAMILIES
from megatron.checkpointing.huggingface import HFFolder, find_hf
from megatron.checkpointing.huggingface.model_files import read_config
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.neox_arguments import ConfigError
from tests.checkpointing.family_models import CASES, config_of, random_model
from tests.checkpointing.golden import fails
from tests.checkpointing.published_models import PUBLISHED
from tests.data.preprocessing.chat_tokenizers import CHATML, fast_tokenizer
from tools.ckpts import convert_hf_to_neox

WRONG: list[Any] = ["6", "yarn", 1.5, -1, 0, [1], ["x"], {"a": 1}, True, None, float("nan")]
SAMPLE = ["llama 3", "gpt_neox", "gpt 2", "olmo 3", "qwen 2 moe windows", "mamba 2", "nemotron h"]
KINDS = [[], 3, "x", None]  # instead of an object


def folder_of(case: str, place: Path) -> Path:
    tokenizer = fast_tokenizer(CHATML)
    random_model(case, torch.float32, vocab_size=len(tokenizer)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return place


def fields(config: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from fields(value, *path, name)


def with_field(config: dict[str, Any], path: tuple[str, ...], value: Any) -> str:
    """The file with another value of a field."""
    changed = json.loads(json.dumps(config))
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return json.dumps(changed)


def imported(folder: Path, target: Path) -> str | None:
    """Returns the command's message if it refuses a folder, None if it takes it. Other exceptions pass."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        convert_hf_to_neox.main(["--hf-model", str(folder), "--output-dir", str(target)])
    except SystemExit as refusal:
        assert not target.exists()
        return str(refusal.code)
    assert target.exists()
    return None


@pytest.mark.parametrize("case", [
    *SAMPLE, *(pytest.param(case, marks=pytest.mark.product) for case in CASES if case not in SAMPLE),
])  # fmt: skip
def test_a_field_of_another_type(case: str, tmp_path: Path) -> None:
    """Drawn by a seed: refused in words, or taken; no other exception, and no folder after a refusal."""
    folder = folder_of(case, tmp_path / "model")
    config, draw = json.loads((folder / "config.json").read_text()), random.Random(case)
    samples = draw.sample([(path, value) for path in fields(config) for value in WRONG], 16)
    for path, value in samples:
        (folder / "config.json").write_text(with_field(config, path, value))
        message = imported(folder, tmp_path / "neox")
        assert message is None or message.startswith("convert_hf_to_neox.py: error: ")


def small_config(model_type: str) -> dict[str, Any]:
    case = next(case for case, (kind, _) in CASES.items() if getattr(transformers, kind).model_type == model_type)
    return json.loads(config_of(case).to_json_string(use_diff=False))


def test_any_field_of_any_family(tmp_path: Path) -> None:
    """Fields that LLaMA has too are tried there alone. Published folders may have other ones."""
    configs = [small_config(model_type) for model_type in FAMILIES]
    configs += [config for _, config in PUBLISHED.values() if config["model_type"] in ("kimi_linear", "lfm2")]
    tried_fields, file = set[tuple[str, ...]](), tmp_path / "config.json"
    for config in sorted(configs, key=lambda config: config["model_type"] != "llama"):
        for path in fields(config):
            if path in tried_fields:
                continue
            for value in ("yarn", [1], {"a": 1}, 0, -1, None):
                file.write_text(with_field(config, path, value))
                with contextlib.suppress(CheckpointError, ConfigError):
                    from_hf(read_config(tmp_path), {}.__getitem__)
        if config["model_type"] == "llama":
            tried_fields = {*fields(config)} - {("max_position_embeddings",)}


def test_fields_of_published_hunyuan_that_nothing_reads(tmp_path: Path) -> None:
    """Hunyuan-A13B has a number for each layer, or false, where other families have one number."""
    _, config = PUBLISHED["tencent/Hunyuan-A13B-Instruct"]
    published = {"moe_intermediate_size": [3072] * 32, "n_group": False, "topk_group": False,
                 "routed_scaling_factor": False, "num_shared_expert": [1] * 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, **published}))
    keys = from_hf(read_config(tmp_path), {}.__getitem__)[0]
    assert keys == from_hf(config, {}.__getitem__)[0] and keys["moe_intermediate_size"] == 3072
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": [3072] * 32}))
    with pytest.raises(CheckpointError, match="intermediate_size: expected a whole number"):
        read_config(tmp_path)


@pytest.mark.parametrize(("path", "value"), [
    (("rope_parameters",), "yarn"), (("rope_parameters", "rope_theta"), "1e4"), (("num_attention_heads",), "6"),
    (("model_type",), ["llama"]), (("hidden_act",), ["silu"]), (("tie_word_embeddings",), "false"),
    (("architectures",), 1.5), (("rope_parameters", "factor"), [8]), (("eos_token_id",), "2"),
    (("num_hidden_layers",), None), (("rms_norm_eps",), "1e-5"), (("pretraining_tp",), True), (("head_dim",), 0),
    (("head_dim",), 2.0**52), (("vocab_size",), 1 << 62),
])  # fmt: skip
def test_the_line_names_the_field(path: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    folder = folder_of("llama 3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(with_field(config, path, value))
    message = imported(folder, tmp_path / "neox")
    assert message is not None and "\n" not in message and path[-1] in message and str(folder) in message


@pytest.mark.parametrize(("case", "spelt"), [
    ("llama 3", {"hidden_size": 32.0, "attention_bias": 0, "num_key_value_heads": 4.0, "pretraining_tp": 1}),
    ("llama 3", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "type": None, "factor": 2}}),
    ("qwen 2", {"max_window_layers": -1}), ("qwen 2 moe", {"decoder_sparse_step": 1.0}),
    ("olmo 1", {"attention_bias": None}),
])  # fmt: skip
def test_unusual_spellings_are_read(case: str, spelt: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of(case, tmp_path / "model")
    original = HFFolder(folder)
    config = json.loads((folder / "config.json").read_text()) | spelt
    (folder / "config.json").write_text(json.dumps(config))
    read = HFFolder(folder)
    keys = from_hf(read.config, read.get)[0]
    ropes = ("rope_scaling", "rotary_emb_base")  # which one of the cases has otherwise
    assert from_hf(original.config, original.get)[0] | dict.fromkeys(ropes) == keys | dict.fromkeys(ropes)
    assert all(type(value) is not float for name, value in keys.items() if name in ("hidden_size", "num_kv_heads"))


@pytest.mark.parametrize("config", [
    {"model_type": "gemma3n", "text_config": {"intermediate_size": [1, 2]}},
    {"model_type": "mellum", "sliding_window_pattern": "LLLG"},
    {"model_type": "openelm", "num_key_value_heads": [3, 4]},
])  # fmt: skip
def test_another_family_is_named_whatever_its_fields(config: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of("llama 3", tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 90, **config}))
    message = imported(folder, tmp_path / "neox")
    assert message is not None and config["model_type"] in message and "expected" not in message


@pytest.mark.product
def test_any_value_in_any_field(tmp_path: Path) -> None:
    """Drawn by hypothesis: refused in words, or taken, as `test_a_field_of_another_type`."""
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies

    folder = folder_of("llama 3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    simple = strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text()
    values = (
        simple | strategies.lists(simple, max_size=3) | strategies.dictionaries(strategies.text(), simple, max_size=2)
    )

    @hypothesis.settings(max_examples=200, deadline=None)
    @hypothesis.given(path=strategies.sampled_from(list(fields(config))), value=values)
    def check(path: tuple[str, ...], value: Any) -> None:
        (folder / "config.json").write_text(with_field(config, path, value))
        imported(folder, tmp_path / "neox")

    check()


def test_companions_of_another_kind(tmp_path: Path) -> None:
    folder = folder_of("llama 3", tmp_path / "model")
    index = {"metadata": {}, "weight_map": dict.fromkeys(HFFolder(folder).shapes, "part.safetensors")}
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert imported(folder, tmp_path / "neox") is None
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json"):
        original = (folder / name).read_bytes()
        for wrong in (*map(json.dumps, KINDS), original[: len(original) // 2].decode()):
            (folder / name).write_text(wrong)
            message = imported(folder, tmp_path / "neox")
            assert message is not None and "\n" not in message and name in message
        (folder / name).write_bytes(original)
    for name, wrong in (("generation_config.json", {"eos_token_id": "2"}), ("model.safetensors.index.json",
                         {"weight_map": ["part.safetensors"]})):  # fmt: skip
        original = (folder / name).read_bytes()
        (folder / name).write_text(json.dumps(wrong))
        message = imported(folder, tmp_path / "neox")
        assert message is not None and f"{name}: {next(iter(wrong))}: " in message
        (folder / name).write_bytes(original)


@pytest.mark.parametrize("values", [
    {"r": "8"}, {"r": 0}, {"lora_alpha": "16"}, {"use_dora": "no"}, {"peft_type": ["LORA"]},
    {"target_modules": {"q": 1}}, {"modules_to_save": "lm_head"},
])  # fmt: skip
def test_adapter_config_of_other_types(values: dict[str, Any], tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **values}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"adapter_config.json: {next(iter(values))}: "):
        PeftFolder(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


LLAMA = b'{"model_type": "llama"}'


@pytest.mark.parametrize(("files", "facts"), [
    ({"a.gguf": b"GGUF"}, ["GGUF"]), ({"consolidated.safetensors": b""}, ["consolidated.safetensors", "Mistral"]),
    ({"consolidated.00.pth": b"", "params.json": b"{}"}, ["convert_raw_llama_weights_to_neox.py"]),
    ({"adapter_config.json": b"{}"}, ["peft", "adapter.py"]), ({"latest": b"global_step3"}, ["load"]),
    ({"config.json": POINTER}, ["config.json: ", "git lfs pull"]),
    ({"config.json": LLAMA, "model.safetensors": POINTER}, ["model.safetensors: ", "git lfs pull"]),
    ({"config.json": LLAMA, "pytorch_model.bin": POINTER}, ["pytorch_model.bin: ", "git lfs pull"]),
], ids=str)  # fmt: skip
def test_other_formats_are_named(files: dict[str, bytes], facts: list[str], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        HFFolder(find_hf(tmp_path))
    assert all(fact in str(refused.value) for fact in facts)


def test_a_file_given_as_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*GGUF"):
        find_hf(tmp_path / "m.gguf")


@pytest.mark.parametrize("count", [None, 3, 3.0, torch.tensor(3), torch.tensor([3.0])])
def test_counters_of_older_programs(count: Any, tmp_path: Path) -> None:
    torch.save({"global_samples": count}, tmp_path / "mp_rank_00_model_states.pt")
    assert OpenCheckpoint(tmp_path).model_state()["global_samples"] is not None or count is None


@pytest.mark.parametrize("count", ["3", 3.5, [3], torch.zeros(2)])
def test_a_counter_that_is_no_integer(count: Any, tmp_path: Path) -> None:
    torch.save({"global_samples": count}, tmp_path / "mp_rank_00_model_states.pt")
    fails("mp_rank_00_model_states.pt.*global_samples", OpenCheckpoint(tmp_path).model_state)
