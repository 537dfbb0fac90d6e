"""Adapters trained here over HuggingFace folders: peft loads them there, and its logits are ours.

The first block of a model may have no adapter, or the model may be part of a model of images."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpointing.adapters import open_with_base, write_merged
from megatron.checkpointing.adapters.exporting import compare_with_peft
from megatron.checkpointing.adapters.merging import unmerged_logits
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.huggingface import HFFolder
from megatron.checkpointing.layout import step_tag
from tests.checkpointing.family_models import random_model
from tests.checkpointing.family_runs import TOKENS
from tests.checkpointing.test_adapters import (
    DELTA_FACTOR,
    MULTIMODAL,
    WITH_DELTA_RULES,
    furthest,
    load_base_model,
    merged_logits,
    multimodal_folder,
)
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, TABLE, cells, config, run_to_end

BOUND, STEPS = 1e-5, 2
# By family, as of `test_adapters.Case`: what has adapters.
TARGETS: dict[str, list[str]] = {
    "gemma3": ["q_proj", "v_proj", "down_proj"], "mistral3": ["q_proj", "o_proj"], "mistral3 with mistral": ["q_proj"],
    "gemma 3": ["q_proj", "down_proj"], "ministral 3": ["q_proj"], "mistral": ["q_proj", "down_proj"],
    "nemotron h": ["q_proj", "o_proj"], "nemotron h dense": ["q_proj", "up_proj"], "mixtral": ["q_proj", "v_proj"],
    "qwen 2 moe": ["up_proj", "down_proj"], "nemotron h latent": ["in_proj", "up_proj"], "mamba 2": ["in_proj"],
    "falcon mamba": ["in_proj", "x_proj"], "qwen 3.5": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"],
    "qwen 3 next": ["in_proj_qkvz", "in_proj_ba", "out_proj"], "deepseek 3": ["q_a_proj", "kv_b_proj", "o_proj"],
    "kimi linear": ["k_proj", "b_proj", "f_a_proj", "g_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "gemma 4": ["q_proj", "v_proj", "down_proj"],
}  # fmt: skip
# What else of `lora` is set: ranks and factors of single projections, and the blocks that have some.
SIZES: dict[str, dict[str, Any]] = {
    "mistral sizes": {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 6}, "alpha_pattern": {"q_proj": 3}},
    "mixtral sizes": {"layers_to_transform": [1], "rank_pattern": {"v_proj": 2}},
    "gemma3 sizes": {"layers_to_transform": 1, "alpha_pattern": {"down_proj": 3}},
}


def model_folder(path: Path, family: str) -> Path:
    if family in MULTIMODAL:
        return multimodal_folder(path, family, torch.float32)
    random_model(family, vocab_size=384).save_pretrained(path)
    return path


@pytest.mark.parametrize(("name", "layout"), cells(
    [("gemma3", "plain"), ("nemotron h", "pp2"), ("mistral sizes", "tp2"),
     ("qwen 2 moe", "tp2 sp")],
    [("gemma 4", "tp2"), ("mistral3", "tp2"), ("falcon mamba", "tp2"), ("nemotron h latent", "pp2"),
      ("mixtral sizes", "zero3"),
     ("gemma3 sizes", "pp2"), ("nemotron h dense", "zero3"), ("mixtral", "plain"), ("kimi linear", "tp2 sp")],
    [("mistral3 with mistral", "plain"), ("gemma 3", "plain"), ("ministral 3", "plain"), ("mistral", "plain"),
     ("nemotron h", "tp2 sp"), ("nemotron h dense", "zero3, deepspeed"), ("mamba 2", "zero3"),
     ("qwen 3.5", "tp2"), ("qwen 3 next", "pp2"), ("deepseek 3", "tp2 sp")],
))  # fmt: skip
def test_peft_loads_what_was_trained_here(name: str, layout: str, tmp_path: Path) -> None:
    family = name.removesuffix(" sizes")
    bound = BOUND * (DELTA_FACTOR if family.startswith(WITH_DELTA_RULES) else 1)
    path, save = model_folder(tmp_path / "model", family), tmp_path / "save"
    folder, (ranks, keys) = HFFolder(path), TABLE[layout]
    model = {key: value for key, value in from_hf(folder.config, folder.get)[0].items() if key != "padded_vocab_size"}
    values = config(model, keys, {
        "save": str(save), "load": str(path), "train_iters": STEPS, "checkpoint_factor": 1, "save_hf": STEPS,
        "vocab_file": str(GOLDEN / "dataset" / "hf_tokenizer"),
        "lora": {"r": 4, "alpha": 8, "target": TARGETS[family], **SIZES.get(name, {})},
    })  # fmt: skip
    run_ranks(run_to_end, ranks, values)
    exported = save / "huggingface" / step_tag(STEPS)
    base, (source,) = open_with_base([save / step_tag(STEPS)])
    actual = unmerged_logits(base, source, TOKENS)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tuned = peft.PeftModel.from_pretrained(load_base_model(path), str(exported)).eval()
    assert not [warning for warning in warned if "missing" in str(warning.message).lower()], warned
    written: dict[str, Any] = load_file(exported / "adapter_model.safetensors")
    loaded_adapters = peft.get_peft_model_state_dict(tuned)
    assert loaded_adapters.keys() == written.keys() and all(
        loaded_adapters[key].equal(value) for key, value in written.items()
    )
    assert json.loads((exported / "adapter_config.json").read_text())["base_model_name_or_path"] == str(path)
    with torch.no_grad():
        peft_logits = tuned(input_ids=TOKENS).logits
        assert (load_base_model(path)(input_ids=TOKENS).logits - peft_logits).abs().max() > 10 * bound, (
            "it does nothing"
        )
    assert furthest(actual, peft_logits) < bound
    compare_with_peft(base, source)
    merged, _ = write_merged(base, [(source, 1.0)], tmp_path / "merged")
    assert furthest(merged_logits(merged), peft_logits) < bound
