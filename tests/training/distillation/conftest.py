"""What tests of distillation share."""

import pytest

from tests.training.distillation.runs import train_teacher


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a trained teacher's checkpoint."""
    return train_teacher(tmp_path_factory.mktemp("teacher"))
