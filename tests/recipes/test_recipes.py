"""The recipes of post-training/: each trains as its file says, on a tiny model and tiny data."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron.data import IndexedDatasetWriter
from megatron.launch import process_info
from megatron.neox_arguments import load
from megatron.training import start, train
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, bit_equal, config, run_to_end

RECIPES = Path(__file__).resolve().parents[2] / "post-training"
FILES = {str(path.relative_to(RECIPES)): path for path in sorted(RECIPES.glob("*/*.yml"))}
# Keys that an import of the recipe's model writes to configs/hf_model.yml, beside those of LLAMA.
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo3": {
        "norm_placement": "olmo3", "use_qk_layernorm": True, "use_separate_qk_norms": True,
        "sliding_window_width": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_local_base_freq": 500000.0, "no_weight_tying": True,
    },
    "chat-sft": {"no_rope_layers": [1, 1, 1, 0], "no_weight_tying": False},
}  # fmt: skip
MODEL = ("num_layers", "hidden_size", "num_attention_heads", "make_vocab_size_divisible_by", "tokenizer_type",
         "vocab_file", "precision", *LLAMA)  # fmt: skip
FIRST_LOSS = {"dpo": math.log(2), "kto": 0.5}  # of a policy that is its reference


def run(rank: int, world_size: int, files: list[str], words: list[str]) -> dict[int, Any]:
    """For the pool: train.py's run of these files; the weights."""
    with redirect_stdout(io.StringIO()):
        training = start(load(files, words), process_info())
        train(training)
    weights = training.engine.weights(master=True)
    training.engine.close()
    return {layer: {name: value.clone() for name, value in tensors.items()} for layer, tensors in weights.items()}


def write(prefix: str, documents: list[list[float]], dtype: type = np.int32) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of files as preprocess_data_with_chat_template.py names them: 160 prompts with answers."""
    prefix, random = str(tmp_path_factory.mktemp("recipes") / "data"), np.random.default_rng(0)
    prompts = random.integers(0, 300, (160, 4)).tolist()
    for name in ("chosen", "rejected", "messages", "completion"):
        texts = [random.integers(0, 300, 3 + i % 9).tolist() for i in range(len(prompts))]
        write(f"{prefix}_{name}_document", [a + b for a, b in zip(prompts, texts, strict=True)])
        write(f"{prefix}_{name}_label_document", [[-100] * 4 + text for text in texts])
    write(f"{prefix}_completion_reward_document", [[i % 2 * 2 - 1] for i in range(len(prompts))], np.float32)
    return prefix


@pytest.mark.parametrize("recipe", FILES)
def test_a_recipe_trains(recipe: str, data: str, tmp_path: Path) -> None:
    own = yaml.safe_load(FILES[recipe].read_text())
    keys = {key: value for key, value in config(LLAMA).items() if key in MODEL}
    keys |= FAMILIES.get(recipe.split("/")[0], {}) | {"seq_length": 48, "max_position_embeddings": 48}
    first = config(ADAMW, keys, train_iters=1, train_batch_size=2, save=str(tmp_path / "model"), checkpoint_factor=1)
    before = run_ranks(run_to_end, 1, first)[0][1]
    (tmp_path / "model.yml").write_text(yaml.safe_dump(keys))
    words = ["exit_interval=2", "log_interval=1", "save_hf=null", "num_workers=0", "async_save=false"]
    words += [f"{key}={small}" for key, small in
              (("max_length", 20), ("max_prompt_length", 3), ("train_batch_size", 4),
               ("train_micro_batch_size_per_gpu", 2)) if key in own]  # fmt: skip
    overrides = [f"load={tmp_path / 'model'}", f"save={tmp_path / 'tuned'}"]
    # In the file "${DATA:-...}_NAME_document"
    overrides += [f"{k}=[{data}{v[0].partition('}')[2]}]" for k, v in own.items() if k.endswith("_data_paths")]
    after = run_ranks(run, 1, [str(tmp_path / "model.yml"), str(FILES[recipe])], words + overrides)[0]
    lines = [json.loads(line) for line in (tmp_path / "tuned/logs/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/lm_loss"] for line in lines if "train/lm_loss" in line]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(FIRST_LOSS.get(own.get("train_impl", ""), losses[0]), abs=2e-5)
    changed = {layer for layer in before if not bit_equal({layer: before[layer]}, {layer: after[layer]})}
    assert changed == ({0, 4, 5} if "trainable" in own else set(before))
