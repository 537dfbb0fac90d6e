"""Folders of tasks: the shipped one, those of `eval_include_path`, and `lm_eval_tasks` and `eval_tasks` in
the repository and the working folder."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm_eval.tasks._yaml_loader import load_yaml

from megatron.neox_arguments import ConfigError, NeoXArgs

SHIPPED = Path(__file__).parent / "tasks"
# Beside the package, where the geodesic fork has its tasks, and in the working folder.
_UNNAMED = ("lm_eval_tasks", "eval_tasks")


def task_folders(args: NeoXArgs) -> list[Path]:
    """Returns all folders of tasks in lm-eval's order: if two folders have a task of the same name, the later
    folder's is used.

    Raises ConfigError for a missing folder of `eval_include_path`.
    """
    return [SHIPPED, *reversed(_unnamed_folders()), *_named_folders(args)]


def searched_folders(args: NeoXArgs) -> str:
    """Returns a line that says which folders are searched for tasks, and which do not exist. Raises
    ConfigError."""
    folders = [*_named_folders(args), *_unnamed_folders()]
    absent = [folder for folder in _places() if folder not in folders]
    searched = f"searched for tasks: lm-eval's own{''.join(f', {folder}' for folder in folders)}"
    return f"{searched}; these folders do not exist: {', '.join(map(str, absent))}" if absent else searched


def warn_of_broken(args: NeoXArgs, logger: logging.Logger) -> None:
    """Logs a warning for each task file of the user that cannot be read; lm-eval would skip it silently."""
    for line in broken([*_named_folders(args), *_unnamed_folders()]):
        logger.warning(line)


def broken(folders: Sequence[Path]) -> Iterator[str]:
    """Yields a line for each task file that cannot be read: lm-eval skips such files silently.

    folders: folders to search for task files, or task files.
    """
    for folder in folders:
        for file in [folder] if folder.is_file() else sorted(folder.rglob("*.yaml")):
            try:
                load_yaml(file, resolve_func=False, recursive=True)
            except Exception as problem:  # of YAML, of an include that is not there
                yield f"{file}: cannot be read as a task: {' '.join(str(problem).split())}"


def _named_folders(args: NeoXArgs) -> list[Path]:
    configured = args.eval_include_path or ()
    folders = [Path(name).expanduser() for name in ([configured] if isinstance(configured, str) else configured)]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        place = args.origin("eval_include_path")
        raise ConfigError([f"{place}: eval_include_path: {folder}: no such folder" for folder in missing])
    return folders


def _unnamed_folders() -> list[Path]:
    return [folder for folder in _places() if folder.is_dir()]


def _places() -> list[Path]:
    roots = dict.fromkeys((SHIPPED.parents[2], Path.cwd().resolve()))
    return [root / name for root in roots for name in _UNNAMED]
