"""Loads the tasks of an evaluation: lm-eval's own tasks, and those in task folders.

Task folders are the shipped folder `tasks`, the folders in `eval_include_path`, and folders named
`lm_eval_tasks` or `eval_tasks` in the repository and in the working folder.
"""

import difflib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from megatron.evaluation.results import LoadedTasks
from megatron.generation.prompts.chat import find_template
from megatron.generation.prompts.files import read_key_file
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs
from megatron.neox_arguments.errors import disk_problem
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.values.best_metric import best_metric
from megatron.neox_arguments.values.local_paths import with_home
from megatron.process import look_for_stop
from megatron.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent / "tasks"
# Names of task folders beside the package (as in the geodesic fork) and in the working folder
_UNNAMED = ("lm_eval_tasks", "eval_tasks")
_YAML = (".yaml", ".yml")
_LOCAL = {
    "arrow",
    "csv",
    "json",
    "pandas",
    "parquet",
    "text",
    "xml",
}  # values of dataset_path with which `datasets` reads local files
_ROW = "eval_tasks/"  # prefix of the metrics of tasks in a run's metrics
_HUB_SECONDS, _HUB_TRIES = 5.0, 2
# Exceptions of datasets and the Hub that mean: not found, or not reachable
_ABSENT = {"ConnectionError", "DatasetNotFoundError", "FileNotFoundError", "OfflineModeIsEnabled", "HTTPError"}


def load_tasks(args: NeoXArgs, tokenizer: Tokenizer, log: Callable[[str], None] = lambda line: None) -> LoadedTasks:
    """Loads the tasks of `eval_tasks`. A task whose data cannot be loaded is noted in the result's
    `failures`.

    Raises ConfigError for unknown names, with the most similar known names, and for YAML files with mistakes.

    log: called with a line of text if the Hub is needed and does not answer.
    """
    assert args.eval_tasks is not None
    manager, names = _manager(args, args.eval_tasks)
    loaded_tasks = LoadedTasks(system_prompt=_system_prompt(args))
    if args.eval_apply_chat_template:
        loaded_tasks.template = find_template(args, tokenizer)
    with find_in_hub_or_cache(log) if any(_may_need_hub(name, manager) for name in names) else nullcontext():
        for name in names:
            look_for_stop()
            try:
                loaded_tasks.tasks[name] = dict(manager.load([name]))
            except Exception as problem:  # of lm-eval, datasets, the Hub, Jinja: a task is data that others wrote
                loaded_tasks.failures[name] = _failure_reason(name, manager, problem)
    for loaded in loaded_tasks.tasks.values():
        for task in loaded["tasks"].values():
            _set_num_fewshot(task, args.eval_num_fewshot)
    return loaded_tasks


@contextmanager
def find_in_hub_or_cache(log: Callable[[str], None]) -> Iterator[None]:
    """Makes HuggingFace's libraries use only the local cache during the `with` block if the Hub does not
    answer.

    The Hub is tried only at the start, so that later requests do not wait for retries without a network: a
    file that is missing in the cache then fails at once, as with HF_HUB_OFFLINE. An answer of a proxy or a
    mirror (HF_ENDPOINT) counts as the Hub's answer.

    log: called with a line of text if the Hub does not answer.
    """
    from huggingface_hub import constants

    problem = None if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if problem is None:
        yield
        return
    log(f"{constants.ENDPOINT} does not answer ({problem}): only files in the local cache (HF_HOME) can be used")
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _unreachable(endpoint: str) -> str | None:
    """Returns the reason why the Hub at `endpoint` does not answer; None if it answers. It uses the proxies
    that huggingface_hub uses."""
    from huggingface_hub.utils import get_session

    problem = None
    for attempt in range(_HUB_TRIES):
        if attempt:
            time.sleep(1.0)
        try:
            get_session().head(endpoint, timeout=_HUB_SECONDS)
            return None
        except Exception as cause:  # of the transport, which is another library in each version
            problem = " ".join(str(cause).split()) or type(cause).__name__
    return problem


def check_best_metric(args: NeoXArgs, loaded_tasks: LoadedTasks) -> None:
    """Raises ConfigError if `save_best` names a metric of tasks that no loaded task has.

    The metrics of groups, of tasks with their own scoring code, and of tasks that could not be loaded are not
    known in advance. So any metric that begins with the name of such a group or task is allowed.
    """
    metric = best_metric(args.save_best)[0] if args.save_best is not None else ""
    if not metric.startswith(_ROW):
        return
    names: list[str] = []
    free = [*loaded_tasks.failures]
    for loaded in loaded_tasks.tasks.values():
        free += loaded.get("groups", ())
        for name, task in loaded["tasks"].items():
            metrics = _metrics(task)
            names += [f"{name}_{metric_name}" for metric_name in metrics or ()]
            free += [name] if metrics is None else []
    wanted_metric = metric.removeprefix(_ROW)
    if wanted_metric in names or any(wanted_metric.startswith(f"{name}_") for name in free):
        return
    available = ", ".join(f"{_ROW}{name}" for name in [*names, *(f"{name}_..." for name in free)])
    raise args.error("save_best", f"{metric}: no task of this run has this metric; set one of {available}")


def _metrics(task: Task) -> list[str] | None:
    """Returns the names of a task's metrics, as in `EvaluationResults.metrics`; None if only the task's own
    code knows them."""
    declared = task.config.metric_list or []
    custom = (
        type(task).process_results is not ConfigurableTask.process_results or task.config.process_results is not None
    )
    if custom or not all(isinstance(entry["metric"], str) and not entry.get("hf_evaluate") for entry in declared):
        return None
    kinds = ["" if kind.name == "none" else f"_{kind.name}" for kind in task._filters]
    return [f"{metric}{kind}" for metric in task.aggregation() for kind in kinds]


def _system_prompt(args: NeoXArgs) -> str | None:
    """Returns the content of `eval_system_prompt_file` if that is set, else `eval_system_prompt`. Raises
    ConfigError if the file cannot be read."""
    if args.eval_system_prompt_file is None:
        return args.eval_system_prompt
    return read_key_file(args, "eval_system_prompt_file").rstrip("\n")


def _set_num_fewshot(task: Task, examples: int | None) -> None:
    """Sets the number of few-shot examples of a task, as lm-eval's `simple_evaluate` does.

    examples: `eval_num_fewshot`. It is ignored for a task that declares `num_fewshot: 0`. None: the task's
        own number is kept; it becomes 0 if the task declares none.
    """
    declared = task.get_config("num_fewshot")
    if examples is not None and declared != 0:
        task.set_config(key="num_fewshot", value=examples)
    elif declared is None:
        task.set_config(key="num_fewshot", value=0)


def _manager(args: NeoXArgs, requested: Sequence[str]) -> tuple[TaskManager, list[str]]:
    # If several folders have a task of one name, lm-eval uses that of the last folder.
    folders = [SHIPPED, *reversed(_unnamed_folders()), *_named_folders(args)]
    place, files = f"{args.origin('eval_tasks')}: eval_tasks", [name for name in requested if name.endswith(_YAML)]
    missing = [f"{place}: {name}: no such file" for name in files if not Path(name).is_file()]
    if missing or (missing := [f"{place}: {line}" for line in broken([Path(name) for name in files])]):
        raise ConfigError(missing)
    # Indexing lm-eval's own 15,000 tasks takes seconds, so they are included only if they are needed.
    local = TaskManager(include_path=list(folders), include_defaults=False, metadata=_metadata(args))
    names = _expand(requested, local)
    if not _missing(names, local):
        return local, names
    full_manager = TaskManager(include_path=list(folders), metadata=_metadata(args))
    names = _expand(requested, full_manager)
    unknown = _missing(names, full_manager)
    if unknown:
        lines = list(_unknown(args, unknown, full_manager))
        raise ConfigError([*lines[:-1], f"{lines[-1]}; {searched_folders(args)}", *broken(folders)])
    return full_manager, names


def _metadata(args: NeoXArgs) -> dict[str, Any]:
    """Returns `eval_task_args`. Unless it is empty, the tokenizer's folder is added as `tokenizer`, because
    RULER's tasks count tokens."""
    task_args: dict[str, Any] = thaw(args.eval_task_args or {})
    if task_args and args.vocab_file is not None and "tokenizer" not in task_args:
        folder = Path(args.vocab_file)
        task_args["tokenizer"] = str(folder if folder.is_dir() else folder.parent)
    return task_args


def _expand(requested: Sequence[str], manager: TaskManager) -> list[str]:
    """Returns the requested task names, with patterns such as `arc_*` replaced by the names that match, and
    tags by their tasks.

    Tags are replaced so that a task that fails does not affect the other tasks of its tag.
    """
    names: list[str] = []
    for name in requested:
        matches = manager.match_tasks([name]) if any(sign in name for sign in "*?[") else []
        for match in matches or [name]:
            entry = manager.task_index.get(match)
            members = sorted(entry.tags) if entry is not None and entry.kind.name == "TAG" else [match]
            names += [member for member in members if member not in names]
    return names


def _missing(names: Sequence[str], manager: TaskManager) -> list[str]:
    """Returns the names that are neither a file nor a task, group or tag known to lm-eval. Groups with
    unknown members are returned too."""
    return [name for name in names if not Path(name).is_file() and not _exists(name, manager, set())]


def _exists(name: str, manager: TaskManager, visited: set[str]) -> bool:
    entry = manager.task_index.get(name)
    if entry is None or name in visited:
        return name in visited
    visited.add(name)
    references = [member for member in _group_members(entry) or [] if not _defines_task(member)]
    names = [member if isinstance(member, str) else member.get("task", member.get("group")) for member in references]
    return all(_exists(member, manager, visited) for member in names if isinstance(member, str))


def _group_members(entry: Any) -> list[Any] | None:
    """Returns the members of a group, which are names or definitions of tasks; None if `entry` is not a group
    with a list of members."""
    members = (entry.cfg or {}).get("task") if entry.kind.name == "GROUP" else None
    return members if isinstance(members, list) else None


def _defines_task(member: Any) -> bool:
    """Returns whether a member of a group defines a task itself, instead of referring to a task by name."""
    return isinstance(member, dict) and ("dataset_path" in member or isinstance(member.get("task"), list))


def _unknown(args: ModelArgs, names: Sequence[str], manager: TaskManager) -> Iterator[str]:
    place = args.origin("eval_tasks")
    for name in names:
        close_names = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.6)
        if name in manager.task_index:
            yield f"{place}: eval_tasks: the group {name} lists tasks that do not exist; correct its file"
        else:
            hint = f"; similar names: {', '.join(close_names)}" if close_names else ""
            yield (
                f"{place}: eval_tasks: there is no task, group or tag {name}{hint}; for tasks of your own, set "
                "eval_include_path to their folder"
            )


def _failure_reason(name: str, manager: TaskManager, problem: Exception) -> str:
    reason = " ".join(str(problem).split()) or type(problem).__name__
    datasets = ", ".join(sorted(_datasets(name, manager)))
    if datasets and (disk := disk_problem(problem)) is not None:
        return f"the cache of the task's data ({datasets}) cannot be written ({disk}); set HF_HOME to a writable folder"
    if datasets and _is_absent(problem):
        return (
            f"the task's data ({datasets}) cannot be fetched: {reason}; without a network, load it once on a connected "
            "machine (datasets.load_dataset) and copy the cache from there (HF_HOME), or write a task that reads a "
            "local JSON-lines file"
        )
    return f"{type(problem).__name__}: {reason}"


def _is_absent(problem: BaseException | None) -> bool:
    """Returns whether an exception, or one of its causes, means that data was not found or not reachable."""
    while problem is not None:
        kinds = {kind.__name__ for kind in type(problem).__mro__}
        if kinds & _ABSENT:
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def _configs(name: str, manager: TaskManager) -> Iterator[Mapping[str, Any]]:
    """Yields the configuration of a task, or of all tasks of a group or tag.

    name: of the task, group or tag, or the path of a task file, which is read.
    """
    entry = manager.task_index.get(name)
    if entry is None:
        yield load_yaml(Path(name), resolve_func=False, recursive=True) if name.endswith(_YAML) else {}
        return
    members = sorted(entry.tags) if entry.kind.name == "TAG" else _group_members(entry)
    for member in [entry.cfg or {}] if members is None else members:
        if isinstance(member, str):
            yield from _configs(member, manager)
        else:
            yield member


def _may_need_hub(name: str, manager: TaskManager) -> bool:
    """Returns whether data of the task, group or tag `name` may have to be downloaded. False only if all of
    the data is certainly on this machine."""
    return not all(
        config.get("custom_dataset") or path in _LOCAL or path and Path(path).exists()
        for config in _configs(name, manager)
        for path in [str(config.get("dataset_path") or "")]
    )


def _datasets(name: str, manager: TaskManager) -> set[str]:
    """Returns the names of the datasets that the task, group or tag `name` reads."""
    return {data for config in _configs(name, manager) for data in _dataset_names(config)}


def _dataset_names(config: Mapping[str, Any]) -> set[str]:
    path, part = config.get("dataset_path"), config.get("dataset_name")
    if path == "json":
        files = (config.get("dataset_kwargs") or {}).get("data_files")
        return {str(file) for file in (files.values() if isinstance(files, dict) else [files]) if file}
    return {f"{path} {part}" if part else str(path)} if path else set()


# -- folders -------------------------------------------------------------------------------------------------


def searched_folders(args: NeoXArgs) -> str:
    """Returns a line of text that says which folders are searched for tasks, and which of them do not exist.
    Raises ConfigError if a folder of `eval_include_path` does not exist."""
    folders = [*_named_folders(args), *_unnamed_folders()]
    absent = [folder for folder in _places() if folder not in folders]
    searched = f"searched for tasks: lm-eval's own{''.join(f', {folder}' for folder in folders)}"
    return f"{searched}; these folders do not exist: {', '.join(map(str, absent))}" if absent else searched


def warn_of_broken(args: NeoXArgs, logger: logging.Logger) -> None:
    """Logs a warning for each of the user's task files that cannot be read, because lm-eval skips them
    silently."""
    for line in broken([*_named_folders(args), *_unnamed_folders()]):
        logger.warning(line)


def broken(folders: Sequence[Path]) -> Iterator[str]:
    """Yields an error message for each task file that cannot be read, because lm-eval skips such files
    silently.

    folders: folders to search for task files, or paths of task files.
    """
    for folder in folders:
        for file in [folder] if folder.is_file() else sorted(folder.rglob("*.yaml")):
            try:
                load_yaml(file, resolve_func=False, recursive=True)
            except Exception as problem:  # invalid YAML, or a file it includes is missing
                yield f"{file}: cannot be read as a task: {' '.join(str(problem).split())}"


def _named_folders(args: NeoXArgs) -> list[Path]:
    configured = args.eval_include_path or ()
    folders = [with_home(name) for name in ([configured] if isinstance(configured, str) else configured)]
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
