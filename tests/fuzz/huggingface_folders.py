"""HuggingFace folders: configuration, weights, index and tokenizer files of models and adapters."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.checkpointing.adapters.peft_folder import PeftFolder
from tests.fuzz.campaign import Kind, command
from tests.fuzz.cases import Case
from tests.fuzz.mutations import json_bytes, spoilt_bytes, spoilt_folder, spoilt_value
from tools.ckpts import convert_hf_to_neox

_FAMILIES = ("llama 3", "gpt_neox", "qwen 2 moe windows", "gemma 3", "mamba 2")
_FAMILY = "family.json"
_ADAPTER = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0,
    "bias": "none", "base_model_name_or_path": "model", "use_rslora": False, "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {}, "modules_to_save": None, "task_type": "CAUSAL_LM", "layers_to_transform": [0, 1],
}  # fmt: skip


@cache
def _files(family: str, sharded: bool) -> dict[str, bytes]:
    import torch

    from tests.checkpointing.family_models import random_model
    from tests.data.preprocessing.chat_tokenizers import CHATML, fast_tokenizer

    with TemporaryDirectory() as folder:
        tokenizer = fast_tokenizer(CHATML)
        model = random_model(family, torch.float32, vocab_size=len(tokenizer))
        model.save_pretrained(folder, max_shard_size="20KB" if sharded else "1GB")
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _header(content: bytes) -> tuple[dict, bytes]:
    """Returns (header, tensors) of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@st.composite
def _model(draw: DrawFn) -> Case:
    family = draw(st.sampled_from(_FAMILIES)), draw(st.booleans())
    files, changed = _files(*family), {}
    if draw(st.integers(0, 3)):
        changed = draw(spoilt_folder(files, ["config.json", *(name for name in files if name.endswith(".index.json"))]))
    else:
        name = draw(st.sampled_from([name for name in files if name.endswith(".safetensors")]))
        header, tensors = _header(files[name])
        spoilt = draw(st.one_of(spoilt_value(header).map(json_bytes), spoilt_bytes(json_bytes(header))))
        changed[name] = len(spoilt).to_bytes(8, "little") + spoilt + tensors
    return {f"model/{name}": entry for name, entry in changed.items()} | {_FAMILY: json_bytes(family)}


def _base(case: Case) -> Case:
    """The files of the model that the case changes."""
    family = case.get(_FAMILY)
    files = _files(*json.loads(family)) if isinstance(family, bytes) else {}
    return {f"model/{name}": content for name, content in files.items()}


@st.composite
def _adapter(draw: DrawFn) -> Case:
    header = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": {
        "dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}  # fmt: skip
    content = draw(spoilt_value(header).map(json_bytes))
    weights = len(content).to_bytes(8, "little") + content + bytes(32)
    config = draw(st.one_of(spoilt_value(_ADAPTER).map(json_bytes), spoilt_bytes(json_bytes(_ADAPTER))))
    return {"adapter/adapter_config.json": config, "adapter/adapter_model.safetensors": weights}


def _run(folder: Path) -> None:
    if (folder / "adapter").exists():
        PeftFolder(folder / "adapter")
        return
    command(convert_hf_to_neox.main, "--hf-model", folder / "model", "--output-dir", folder / "neox")


KIND = Kind("huggingface_folders", st.one_of(_model(), _model(), _adapter()), _run, _base)
