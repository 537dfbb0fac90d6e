"""Builds the callbacks of a run: one list, in the order in which each of their methods is called. And loads a
user's own: classes in Python files that `callbacks` names."""

import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron.callbacks import Callback
from megatron.distributed import run_on_each_rank
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.training.builtin_callbacks.best_model import BestModelCallback
from megatron.training.builtin_callbacks.compiled_graphs import CompiledGraphs
from megatron.training.builtin_callbacks.gradient_probes import build_probes
from megatron.training.builtin_callbacks.history import HistoryCallback
from megatron.training.builtin_callbacks.log import LogCallback, ProgressBarCallback, build_bar
from megatron.training.builtin_callbacks.memory_parts import MemoryParts
from megatron.training.builtin_callbacks.packing_efficiency import PackingEfficiency
from megatron.training.builtin_callbacks.profiling import StepProfiler
from megatron.training.builtin_callbacks.router_load import build_router_load
from megatron.training.builtin_callbacks.saving import SaveCallback
from megatron.training.builtin_callbacks.stopping import StopCallback
from megatron.training.builtin_callbacks.trackers import Trackers
from megatron.training.builtin_callbacks.validation import ValidationCallback
from megatron.training.metrics.loggers import build_loggers
from megatron.training.metrics.run_metadata import metadata_line, run_metadata
from megatron.training.run import Training
from megatron.training.step_results import StepResults


def name_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Returns the callbacks by the name of their class; `NAME 2` is the second of a class."""
    names = [type(callback).__name__ for callback in callbacks]
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    return {f"{n} {i + 1}" if i else n: c for n, i, c in zip(names, earlier, callbacks, strict=True)}


def states_of(callbacks: Mapping[str, Callback]) -> dict[str, Mapping[str, Any]]:
    """Returns copies of the states of those callbacks that have one, by name, for a checkpoint.

    All ranks call it together. Raises TypeError for a state that a checkpoint could not be loaded with.
    """
    states = {name: callback.state() for name, callback in callbacks.items()}
    return {name: _copied(f"{name}.state()", state) for name, state in states.items() if state}


def _copied(place: str, value: Any) -> Any:
    """Returns a copy that later steps do not change; a checkpoint may be written beside them."""
    if isinstance(value, Mapping):
        return {key: _copied(f"{place}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(f"{place}[{i}]", item) for i, item in enumerate(value)]
    if type(value) is torch.Tensor:
        return value.detach().cpu().clone()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"callbacks: {place} is a {type(value).__name__}; a checkpoint keeps numbers, text, tensors, lists and dicts "
        "of callbacks; return these"
    )


def build_callbacks(training: Training, results: StepResults, evaluations: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks of a run. All ranks call it together, before the first step.

    evaluations: callbacks that a program gives the run, such as `eval_tasks` and `demo_prompts`. They come
        after validation and before the row of metrics is written.

    The user's own (`callbacks`) come before the checkpoint is saved, so that it holds their state after the
    step. The history comes last and records how all others ended.
    """
    args, groups, loop, logger = training.args, training.groups, training.loop, training.logger
    callbacks: list[Callback] = []  # those that call the others' methods hold the list itself
    best = [BestModelCallback(training)] if args.save_best is not None else []
    loop.bar = build_bar(training)
    stop = StopCallback(training, results.settle)
    metadata = run_metadata(args, groups, training.engine.stage)
    logger.info(metadata_line(metadata))
    packing = PackingEfficiency(args, groups)
    probes, gradients = build_probes(training)
    profiler = StepProfiler(args, groups, logger, stop.settle)
    run_id, rank, start_iteration = training.checkpointer.run_id, groups.world_rank, training.iteration
    loggers = run_on_each_rank(
        groups, lambda: build_loggers(args, start_iteration, run_id, metadata, rank, logger.warning)
    )
    router_load = build_router_load(training)
    trackers = Trackers(training, loggers)
    log = LogCallback(training, [*probes, packing], trackers.on_settled)

    def settle() -> None:
        results.settle()
        log.settle()

    loop.settle = settle
    callbacks += [
        *([MemoryParts(training)] if args.profile_memory is not None else []),  # first: it sees a step and no more
        packing,  # counts the places of a step's rows
        gradients,  # shows gradients to those who measure them
        *([CompiledGraphs()] if args.compile else []),
        log,  # takes the step's values, to be read when the next step has begun
        *router_load,  # likewise, the load of experts
        stop,  # decides whether this step is the last, and whether a save is due
        ValidationCallback(training, callbacks),  # calls on_validation_end
        *training.method.callbacks(training),
        *evaluations,  # eval_tasks, demo_prompts
        *best,  # keeps the model if validation or evaluation say so
        trackers,  # write the row, to which all above may have added
        *training.user_callbacks,
        SaveCallback(training, callbacks),  # calls on_save; all above have counted the step in their state
        ProgressBarCallback(loop.bar),
        profiler,  # begins and ends its window between two steps
        HistoryCallback(training, metadata),  # status.json, training_history.json, training_summary.json; last
    ]
    return callbacks


def load_callbacks(args: NeoXArgs) -> list[Callback]:
    """Returns one instance of each class that `callbacks` names (`FILE.py:CLASS`), in that order.

    A file is imported once, even for several classes. Raises ConfigError if a file is missing or cannot be
    imported, or if a class is missing, is no Callback or fails.
    """
    modules: dict[Path, ModuleType] = {}
    loaded = []
    for entry in args.callbacks:
        file_name, _, class_name = entry.rpartition(":")
        if not file_name or not class_name.isidentifier():
            raise args.error("callbacks", f"{entry}: expected FILE.py:CLASS")
        path = Path(file_name).expanduser().resolve()
        if path not in modules:
            modules[path] = _import_file(args, entry, path, len(modules))
        loaded.append(_make_callback(args, entry, getattr(modules[path], class_name, None)))
    return loaded


def _import_file(args: ModelArgs, entry: str, path: Path, number: int) -> ModuleType:
    if not path.is_file():
        raise args.error("callbacks", f"{entry}: {path}: no such file")
    name = f"user_callbacks_{number}_{path.stem}"  # two folders may have files of one name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise args.error("callbacks", f"{entry}: {path}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look for it there
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        raise args.error("callbacks", f"{entry}: {path} cannot be imported ({reason})") from problem
    return module


def _make_callback(args: ModelArgs, entry: str, callback_class: object) -> Callback:
    class_name = entry.rpartition(":")[2]
    if callback_class is None:
        raise args.error("callbacks", f"{entry}: the file has no class {class_name}")
    if not inspect.isclass(callback_class) or not issubclass(callback_class, Callback):
        raise args.error("callbacks", f"{entry}: {class_name} is not a subclass of megatron.callbacks.Callback")
    try:
        return callback_class()
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        raise args.error("callbacks", f"{entry}: {class_name}() failed ({reason})") from problem
