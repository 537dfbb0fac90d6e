"""New pipelines: the recipes that come with the package, copied into a folder to be changed there."""

import shutil
from pathlib import Path

from megatron.launch import install_root
from megatron.pipelines.definition import FILE
from megatron.pipelines.errors import PipelineError

FOLDER = Path("configs/pipelines")
_FOLDERS = ("checkpoints", "configs", "data/raw", "data/packed", "data/sft", "data/dpo", "logs")
_GATES = Path("configs/promotion_gates.yml")


def recipes() -> list[str]:
    """The names of the recipes."""
    return sorted(path.parent.name for path in (install_root() / FOLDER).glob(f"*/{FILE}"))


def write_recipe(recipe: str, target: Path) -> Path:
    """Write a recipe's pipeline.yml and configs into a folder, with the folders that its stages use; the
    file.

    A recipe without gates of its own gets `configs/promotion_gates.yml` of the repository. Raises
    PipelineError for a folder that has a pipeline already.
    """
    if recipe not in recipes():
        raise PipelineError(f"--recipe {recipe}: there is none; there are {', '.join(recipes())}")
    source = install_root() / FOLDER / recipe
    if (target / FILE).exists():
        raise PipelineError(f"{target / FILE}: is there already; give another folder, or remove it")
    try:
        for name in _FOLDERS:
            (target / name).mkdir(parents=True, exist_ok=True)
        gates = target / _GATES
        if not (source / _GATES).is_file() and not gates.exists():
            shutil.copyfile(install_root() / _GATES, gates)
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if n == FILE])
        shutil.copyfile(source / FILE, target / FILE)  # last: without it the folder is no pipeline
    except OSError as problem:
        raise PipelineError(f"{problem.filename or target}: cannot be written ({problem.strerror})") from None
    return target / FILE
