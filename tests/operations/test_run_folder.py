"""Reading a run's folders, of runs that the training loop wrote."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.operations.run_folder import RunFolderError, experiment_of, open_run
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps whose log folder lies elsewhere."""
    folder = tmp_path_factory.mktemp("run")
    keys = {
        "save": str(folder / "save"),
        "log_dir": str(folder / "elsewhere"),
        "train_iters": 3,
        "log_interval": 1,
        "checkpoint_factor": 3,
    }
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, **keys))
    return folder / "save"


def test_a_run_is_found_by_each_of_its_folders(save: Path) -> None:
    logs = save.parent / "elsewhere"
    run = open_run(save)
    assert (run.save, run.logs) == (save, logs)
    assert open_run(logs).rows() == open_run(logs / "metrics.jsonl").rows() == run.rows()
    assert [row["iteration"] for row in run.rows() if "train/lm_loss" in row] == [1, 2, 3]
    assert run.status()["status"] == run.summary()["status"] == "finished"
    assert run.status()["iteration"] == 3


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        open_run(tmp_path)
    with pytest.raises(RunFolderError, match="no such folder"):
        open_run(tmp_path / "absent")
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"status\.json: cannot be read"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("save", "site", "name"),
    [
        ("/p/checkpoints/org/exp,a=1", "/p/checkpoints/org", "exp,a=1"),
        ("/p/checkpoints/org/exp/stage2", "/p/checkpoints/org", "exp"),
        ("/elsewhere/exp", "/p/checkpoints/org", "exp"),
        ("/elsewhere/exp", None, "exp"),
    ],
)
def test_experiment_of(save: str, site: str | None, name: str) -> None:
    assert experiment_of(save, site) == name


def test_reading_a_run_imports_no_torch() -> None:
    code = "import sys, megatron.operations.run_folder; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
