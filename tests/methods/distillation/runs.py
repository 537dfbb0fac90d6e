"""Tiny runs that learn from a teacher: a trained one of another shape and family; students."""

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.checkpointing.family_models import random_model
from tests.training.runs import ADAMW, BASE, GOLDEN, LLAMA, NEOX, OFFLOADED, TABLE, config

TOKENIZER = Path(BASE["vocab_file"])
_TEXT, _LABELS = ([str(GOLDEN / "dataset" / f"instruct_{kind}_document")] for kind in ("text", "label"))
LABELLED = {
    "data_path": None, "split": None, "train_data_paths": _TEXT, "train_label_data_paths": _LABELS,
    "valid_data_paths": _TEXT, "valid_label_data_paths": _LABELS,
}  # fmt: skip
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{n: TABLE[n][1] for n in ("tp2 sp", "pp2", "zero1", "zero3", "zero1, deepspeed", "zero3, deepspeed")},
    "dp2": {"num_workers": 1},
    "zero2, offloaded": OFFLOADED,
}
"""Keys of layouts of two ranks."""


def teacher_keys(**overrides: Any) -> dict[str, Any]:
    return config(NEOX, num_layers=3, hidden_size=48, num_attention_heads=2, train_iters=6, seed=7, **{
        "max_position_embeddings": 64, "optimizer": {"type": "Adam", "params": {"lr": 2e-2}},
    }, **overrides)  # fmt: skip


def hf_folder(case: str, folder: Path) -> str:
    """The folder of a teacher of HuggingFace's; its vocabulary is no multiple of anything."""
    random_model(case, torch.float32, vocab_size=381).save_pretrained(folder)
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    return str(folder)


def student(teacher: str, *parts: dict[str, Any], **distillation: Any) -> dict[str, Any]:
    """A run that learns; `distillation` are its keys of that section."""
    section = {"distillation": {"teacher": teacher, **distillation}}
    return config(LLAMA, ADAMW, {"num_layers": 2, "train_micro_batch_size_per_gpu": 2}, section, *parts)
