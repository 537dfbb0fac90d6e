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
    """Returns the names of the recipes."""
    return sorted(path.parent.name for path in (install_root() / FOLDER).glob(f"*/{FILE}"))


def write_recipe(recipe: str, target: Path) -> Path:
    """Starts a new pipeline in the folder `target` from a recipe, and returns the path of its pipeline.yml.

    It copies the recipe's files and creates the folders of the stages. A recipe without gates gets
    `configs/promotion_gates.yml` of the repository. Raises PipelineError for an unknown recipe, and if the
    folder already has a pipeline.
    """
    if recipe not in recipes():
        raise PipelineError(f"--recipe {recipe}: no such recipe; choose one of {', '.join(recipes())}")
    source = install_root() / FOLDER / recipe
    if (target / FILE).exists():
        raise PipelineError(f"{target / FILE}: already exists; give another folder, or remove it")
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
