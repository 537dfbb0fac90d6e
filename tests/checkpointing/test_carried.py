"""Files beside the weights of a HuggingFace model, and their precision, into a checkpoint and out again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron.checkpointing import read_manifest, verify
from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.checkpointing.weight_files import describe_checkpoint
from tests.checkpointing.family_models import random_model
from tests.checkpointing.golden import GOLDEN, fails
from tests.checkpointing.test_huggingface import imported, model_folder
from tools.ckpts import convert_hf_to_neox

TERMS = {"LICENSE": "as it is", "LICENSE.txt": "too", "USE_POLICY.md": "# Do no harm", "NOTICE": "Built with it"}
CARD = """---
license: llama3.2
language: [en, de]
tags:
- facebook
extra_gated_prompt: >-
  Read the terms: all of them.
model-index:
- name: great
---
# A model
"""
FIELDS: dict[str, Any] = {"attention_dropout": 0.25, "initializer_range": 0.3, "pretraining_tp": 1, "use_cache": False,
                          "own": {"a": [1, None]}, "transformers_version": "4.40.1",
                          "auto_map": {"AutoModel": "code.Model"}}  # fmt: skip
# Of processors, of further templates, of Mistral's tokenizers.
COMPANION_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", "SYSTEM_PROMPT.txt", "tokenizer.model.v3", "tekken.json", "qwen.tiktoken",
    "chat_template.json", "additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


@pytest.mark.parametrize("family", ["gpt_neox", "gemma 3"])
def test_terms_card_and_every_field_come_out_as_they_went_in(family: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "hf", family)
    for name, text in (TERMS | {"README.md": CARD}).items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text()) | FIELDS
    (folder / "config.json").write_text(json.dumps(config))
    path, args = imported(folder, tmp_path / "neox")
    for trained in (False, True):
        if trained:
            (path / "manifest.json").write_text(replace(read_manifest(path), consumed_samples=8).to_json())  # type: ignore
        export_hf(path, args, tmp_path / "back")  # as plain transformers reads it
        for name, text in TERMS.items():
            assert (tmp_path / "back" / name).read_text() == text
        card = yaml.safe_load((tmp_path / "back" / "README.md").read_text().split("---\n")[1])
        expected = yaml.safe_load(CARD.split("---\n")[1]) | {"tags": ["facebook", "gpt-neox"]}
        if trained:
            del expected["model-index"]  # scores of other weights
        assert expected.items() <= card.items() and card["library_name"] == "transformers"
        exported_config = json.loads((tmp_path / "back" / "config.json").read_text())
        assert "auto_map" not in exported_config, "code that does not come along"
        expected_config = {name: value for name, value in config.items() if name != "auto_map"}
        assert {name: exported_config.get(name) for name in expected_config} == expected_config
        assert list(exported_config)[: len(expected_config)] == list(expected_config), "in their order"


def test_processors_and_further_templates_come_out_as_they_went_in(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    random_model("llama 3", vocab_size=384).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "dataset" / "hf_tokenizer")
    tokenizer.chat_template = {name: f"{{{{ {name!r} }}}}" for name in ("default", "rag", "tool_use")}
    tokenizer.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "rag.jinja").is_file(), "as transformers writes them"
    for name in COMPANION_FILES:
        if not (folder / name).exists():
            (folder / name).write_bytes(f"{{\r\n {name}\xfc".encode("latin-1"))
    (folder / "modeling_own.py").write_text("code does not come along")
    path, _ = import_hf(HFFolder(folder), tmp_path / "neox", save_tokenizer=True)
    manifest = verify(path)
    assert manifest is not None and {f"huggingface/{name}" for name in COMPANION_FILES} < manifest.files.keys()
    args, _ = load_checkpoint_args(path)
    for _ in range(2):  # the second time over the first
        export_hf(path, args, tmp_path / "back")
        names = {str(file.relative_to(tmp_path / "back")) for file in (tmp_path / "back").rglob("*") if file.is_file()}
        assert {*COMPANION_FILES, "chat_template.jinja", "tokenizer.json"} < names and "modeling_own.py" not in names
        for name in names - {"config.json", "README.md", "model.safetensors"}:
            assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == tokenizer.chat_template
    assert (tmp_path / "neox" / "tokenizer" / "additional_chat_templates" / "rag.jinja").is_file()
    export_hf(path, args, tmp_path / "bare", tokenizer=False, check=False)
    assert (tmp_path / "bare" / "processor_config.json").is_file()
    assert not {"tekken.json", "additional_chat_templates"} & {file.name for file in (tmp_path / "bare").iterdir()}
    (tmp_path / "back" / "additional_chat_templates" / "thesis.tex").write_text("")
    fails("additional_chat_templates/thesis.tex", export_hf, path, args, tmp_path / "back")


def test_a_field_that_would_change_the_model_does_not_come_back(tmp_path: Path) -> None:
    """A run that reads longer texts than the imported model."""
    path, args = imported(model_folder(tmp_path / "hf", "llama 2"), tmp_path / "neox")
    longer = args.replace(max_position_embeddings=4 * args.max_position_embeddings, rotary_emb_base=77777)
    export_hf(path, longer, tmp_path / "back")
    exported_config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (
        exported_config["max_position_embeddings"] == longer.max_position_embeddings
        and exported_config["rope_theta"] == 77777
    )
    assert "rope_parameters" not in exported_config, "whose base is another"


def test_weights_of_several_kinds_take_a_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16, with norms in fp32; a number that fp16 cannot hold is named."""
    file = model_folder(tmp_path / "hf", dtype=torch.bfloat16) / "model.safetensors"
    tensors = {name: value.float() * 1.001 if "norm" in name else value for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    arguments = ["--hf-model", str(tmp_path / "hf"), "--output-dir", str(tmp_path / "neox")]
    with pytest.raises(SystemExit, match=r"bfloat16, float32.* --precision"):
        convert_hf_to_neox.main(arguments)
    convert_hf_to_neox.main([*arguments, "--precision", "bf16"])
    path = tmp_path / "neox" / "global_step0"
    assert "largest logit difference to transformers" in capsys.readouterr().out
    args, facts = load_checkpoint_args(path)
    assert facts.dtypes == {torch.bfloat16} == describe_checkpoint(path).dtypes and args.params_dtype == "bf16"
    export_hf(path, args, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], value.bfloat16()) for name, value in tensors.items())
    convert_hf_to_neox.main([*arguments, "--precision", "fp32", "--iteration", "1"])
    args, _ = load_checkpoint_args(tmp_path / "neox" / "global_step1")
    export_hf(tmp_path / "neox" / "global_step1", args, tmp_path / "wide")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[name], value.float()) for name, value in tensors.items())

    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(SystemExit, match=r"model.norm.weight: .*fp16.*1e\+06"):
        convert_hf_to_neox.main([*arguments, "--precision", "fp16", "--iteration", "2"])
    assert not list((tmp_path / "neox").glob("*step2"))
