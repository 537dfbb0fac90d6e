"""Folders of tasks: shipped ones, those of `eval_include_path`, and those that need not be named."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm_eval.tasks._yaml_loader import load_yaml

from megatron.neox_arguments import ConfigError, NeoXArgs

SHIPPED = Path(__file__).parent / "tasks"
# Beside the package, where the geodesic fork has its tasks, and in the working folder.
_UNNAMED = ("lm_eval_tasks", "eval_tasks")


def task_folders(args: NeoXArgs) -> list[Path]:
    """All folders, in lm-eval's order: of two tasks with one name it takes that of the later folder. Raises
    ConfigError for a folder of `eval_include_path` that is not there."""
    return [SHIPPED, *reversed(_unnamed_folders()), *_named_folders(args)]


def searched_folders(args: NeoXArgs) -> str:
    """In one line, where tasks are looked for, and where no folder is. Raises ConfigError."""
    folders = [*_named_folders(args), *_unnamed_folders()]
    absent = [folder for folder in _places() if folder not in folders]
    found = f"searched for tasks: lm-eval's own{''.join(f', {folder}' for folder in folders)}"
    return f"{found}; these folders do not exist: {', '.join(map(str, absent))}" if absent else found


def warn_of_broken(args: NeoXArgs, logger: logging.Logger) -> None:
    """Say which of one's own task files are passed over."""
    for line in broken([*_named_folders(args), *_unnamed_folders()]):
        logger.warning(line)


def broken(folders: Sequence[Path]) -> Iterator[str]:
    """Task files, of folders or given themselves, that cannot be read; lm-eval passes over them in
    silence."""
    for folder in folders:
        for file in [folder] if folder.is_file() else sorted(folder.rglob("*.yaml")):
            try:
                load_yaml(file, resolve_func=False, recursive=True)
            except Exception as problem:  # of YAML, of an include that is not there
                yield f"{file}: cannot be read as a task: {' '.join(str(problem).split())}"


def _named_folders(args: NeoXArgs) -> list[Path]:
    given = args.eval_include_path or ()
    folders = [Path(name).expanduser() for name in ([given] if isinstance(given, str) else given)]
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
