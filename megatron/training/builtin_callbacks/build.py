"""Builds the list of a run's callbacks, in the order in which they are called.

It also loads the user's own callbacks: classes in Python files that the key `callbacks` names.
"""

import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron.callbacks import Callback, Step
from megatron.distributed import run_on_each_rank
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.values.local_paths import with_home
from megatron.training.builtin_callbacks.best_model import BestModelCallback
from megatron.training.builtin_callbacks.compiled_graphs import CompiledGraphs
from megatron.training.builtin_callbacks.data_files import DataFilesCheck
from megatron.training.builtin_callbacks.gradient_probes import build_probes
from megatron.training.builtin_callbacks.history import HistoryCallback
from megatron.training.builtin_callbacks.local_saving import LocalSaveCallback
from megatron.training.builtin_callbacks.log import LogCallback, ProgressBarCallback, build_bar
from megatron.training.builtin_callbacks.memory_parts import MemoryParts
from megatron.training.builtin_callbacks.packing_efficiency import PackingEfficiency
from megatron.training.builtin_callbacks.plan_comparison import PlanComparison
from megatron.training.builtin_callbacks.profiling import StepProfiler
from megatron.training.builtin_callbacks.replica_check import ReplicaCheck
from megatron.training.builtin_callbacks.router_load import build_router_load
from megatron.training.builtin_callbacks.saving import SaveCallback
from megatron.training.builtin_callbacks.spikes import build_spike_reports
from megatron.training.builtin_callbacks.stopping import StopCallback
from megatron.training.builtin_callbacks.trackers import Trackers
from megatron.training.builtin_callbacks.validation import ValidationCallback
from megatron.training.builtin_callbacks.zero_embeddings import ZeroEmbeddings
from megatron.training.metrics.loggers import build_loggers
from megatron.training.metrics.run_metadata import metadata_line, run_metadata
from megatron.training.run import Training
from megatron.training.step_results import StepResults


def name_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Returns the callbacks by the name of their class; the second of one class is named `NAME 2`."""
    names = [type(callback).__name__ for callback in callbacks]
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    return {f"{n} {i + 1}" if i else n: c for n, i, c in zip(names, earlier, callbacks, strict=True)}


def states_of(callbacks: Mapping[str, Callback]) -> dict[str, Mapping[str, Any]]:
    """Returns copies of the callbacks' states, by name, for a checkpoint; empty states are left out.

    All ranks call it together. Raises TypeError if a state holds a type that checkpoints cannot keep.
    """
    states = {name: callback.state() for name, callback in callbacks.items()}
    return {name: _copied(f"{name}.state()", state) for name, state in states.items() if state}


def _copied(place: str, value: Any) -> Any:
    """Returns a deep copy of a state, because a checkpoint may be written while later steps change the state.

    place: names the value in errors. Raises TypeError for a type that checkpoints cannot keep.
    """
    if isinstance(value, Mapping):
        return {key: _copied(f"{place}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(f"{place}[{i}]", item) for i, item in enumerate(value)]
    if type(value) is torch.Tensor:
        return value.detach().cpu().clone()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"callbacks: {place} is a {type(value).__name__}, which a checkpoint cannot keep; return numbers, text, "
        "tensors, lists or dicts"
    )


def build_callbacks(training: Training, results: StepResults, evaluations: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks of a run. All ranks call it together, before the first step.

    evaluations: callbacks that the program adds, such as those of `eval_tasks` and `demo_prompts`. They run
        after validation and before the row of metrics is written.

    The user's own callbacks (`callbacks`) run before the checkpoint is saved, so that it holds their state
    after the step. The history comes last, because it records how the others ended.
    """
    args, groups, loop, logger = training.args, training.groups, training.loop, training.logger
    callbacks: list[Callback] = []  # callbacks that call others keep a reference to this list
    best = [BestModelCallback(training)] if args.save_best is not None else []
    loop.bar = build_bar(training)
    stop = StopCallback(training, results.settle)
    metadata = run_metadata(args, groups, training.engine.stage)
    logger.info(metadata_line(metadata))
    zero_embeddings = []
    if training.zero_tokens is not None and training.iteration == 0:
        zero_embeddings = [ZeroEmbeddings(training.zero_tokens, training.tokenizer.pad)]
    packing = PackingEfficiency(args, groups)
    probes, gradients = build_probes(training)
    profiler = StepProfiler(args, groups, logger, stop.settle)
    run_id, rank, start_iteration = training.checkpointer.run_id, groups.world_rank, training.iteration
    loggers = run_on_each_rank(
        groups, lambda: build_loggers(args, start_iteration, run_id, metadata, rank, logger.warning)
    )
    router_load = build_router_load(training)
    trackers = Trackers(training, loggers)
    comparisons = [PlanComparison(training)] if args.plan_file is not None else []

    def on_settled(step: Step) -> None:
        trackers.on_settled(step)
        for comparison in comparisons:
            comparison.on_settled(step)

    spikes = build_spike_reports(training)
    log = LogCallback(training, [*probes, packing], on_settled)

    def settle() -> None:
        results.settle()
        for report in spikes:
            report.settle()
        log.settle()

    loop.settle = settle
    callbacks += [
        *([MemoryParts(training)] if args.profile_memory is not None else []),  # first: it measures the step alone
        *zero_embeddings,
        packing,  # counts padding and trained tokens
        gradients,  # passes gradients to probes
        *([CompiledGraphs()] if args.compile else []),
        log,  # collects the step's values, which are read when the next step has begun
        *spikes,  # judges the step before
        *router_load,  # does the same with the load of experts
        *([ReplicaCheck(training)] if args.replica_check_interval else []),  # ends the run if copies differ
        *([] if args.allow_changed_data else [DataFilesCheck(training)]),  # before saves
        stop,  # decides whether this step is the last, and whether a save is due
        ValidationCallback(training, callbacks),  # calls on_validation_end
        *training.method.callbacks(training),
        *evaluations,  # eval_tasks, demo_prompts
        *best,  # saves the model if it is the best so far
        trackers,  # write the row, to which the callbacks above have added
        *training.user_callbacks,
        SaveCallback(training, callbacks),  # calls on_save; the states of the callbacks above include this step
        *([LocalSaveCallback(training, local)] if (local := training.local_saves) is not None else []),
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
        path = with_home(file_name).resolve()
        if path not in modules:
            modules[path] = _import_file(args, entry, path, len(modules))
        loaded.append(_make_callback(args, entry, getattr(modules[path], class_name, None)))
    return loaded


def _import_file(args: ModelArgs, entry: str, path: Path, number: int) -> ModuleType:
    if not path.is_file():
        raise args.error("callbacks", f"{entry}: {path}: no such file")
    name = f"user_callbacks_{number}_{path.stem}"  # files in two folders may have the same name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise args.error("callbacks", f"{entry}: {path} is not a Python file")
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
