"""SmolLM2-135M-Instruct, which was really trained, for modules with `pytestmark = pytest.mark.real`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import real_model as model
from tools.ckpts import convert_hf_to_neox

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "real"


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder that transformers reads, with tokenizer and chat template."""
    folder = model.verified_folder(CACHE)
    if folder is None:
        pytest.fail(f"{CACHE}: {model.NAME} is missing or damaged; `make test-real` makes it first")
    return folder


@pytest.fixture(scope="session")
def real_checkpoint(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Imports the model by the command, as 3 tensor ranks, with its tokenizer."""
    output = tmp_path_factory.mktemp("real") / "imported"
    words = ["--hf-model", real_model, "--output-dir", output, "--tp", "3", "--save-tokenizer"]
    convert_hf_to_neox.main([str(word) for word in words])
    yield output
    shutil.rmtree(output)
