"""Fixtures of the tests of distillation."""

import shutil

import pytest
import torch

from tests.checkpointing.family_models import random_model
from tests.methods.distillation.runs import TOKENIZER, teacher_keys
from tests.pool import run_ranks
from tests.training.runs import run_to_end

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.distillation.declaration",
    "megatron.methods.distillation.checks",
    "megatron.methods.distillation.method",
)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a trained teacher's checkpoint, written by two tensor ranks."""
    folder = str(tmp_path_factory.mktemp("teacher"))
    run_ranks(run_to_end, 2, teacher_keys(save=folder, checkpoint_factor=6, model_parallel_size=2))
    return folder


@pytest.fixture(scope="session")
def hf_teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hf")
    random_model("llama 3", torch.float32, vocab_size=381).save_pretrained(folder)  # no multiple of anything
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    return str(folder)
