"""What tests of distillation share."""

import pytest

from tests.pool import run_ranks
from tests.training.distillation.runs import teacher_keys
from tests.training.runs import run_to_end


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a trained teacher's checkpoint, written by two tensor ranks."""
    folder = str(tmp_path_factory.mktemp("teacher"))
    run_ranks(run_to_end, 2, teacher_keys(save=folder, checkpoint_factor=6, model_parallel_size=2))
    return folder
