"""Fixtures of the tests of distillation."""

import pytest

from tests.methods.distillation.runs import hf_folder, teacher_keys
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
    return hf_folder("llama 3", tmp_path_factory.mktemp("hf"))
