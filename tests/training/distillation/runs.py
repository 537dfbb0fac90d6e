"""Tiny runs that learn from a teacher, for tests: a teacher of another shape, trained for some steps, and a
student of two layers."""

from pathlib import Path
from typing import Any

from tests.pool import run_ranks
from tests.training.runs import ADAMW, GOLDEN, LLAMA, NEOX, config, run_to_end

LABELLED = {
    "data_path": None, "split": None, "train_data_paths": [str(GOLDEN / "dataset" / "instruct_text_document")],
    "train_label_data_paths": [str(GOLDEN / "dataset" / "instruct_label_document")],
    "valid_data_paths": [str(GOLDEN / "dataset" / "instruct_text_document")],
    "valid_label_data_paths": [str(GOLDEN / "dataset" / "instruct_label_document")],
}  # fmt: skip


def teacher_keys(**more: Any) -> dict[str, Any]:
    """A run that trains a teacher: another shape than the student's, and another family."""
    return config(NEOX, num_layers=3, hidden_size=48, num_attention_heads=2, train_iters=6, seed=7, **{
        "max_position_embeddings": 64, "optimizer": {"type": "Adam", "params": {"lr": 2e-2}},
    }, **more)  # fmt: skip


def train_teacher(folder: Path) -> str:
    """The folder of a teacher's checkpoint, written by two tensor ranks."""
    keys = teacher_keys(save=str(folder), checkpoint_factor=6, model_parallel_size=2)
    run_ranks(run_to_end, 2, keys)
    return str(folder)


def student(teacher: str, *parts: dict[str, Any], **distillation: Any) -> dict[str, Any]:
    """A run of a student of two layers; `distillation` are its keys of that section."""
    section = {"distillation": {"teacher": teacher, **distillation}}
    return config(LLAMA, ADAMW, {"num_layers": 2, "train_micro_batch_size_per_gpu": 2}, section, *parts)
