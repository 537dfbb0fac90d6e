"""Builds the callbacks of a run: one list, in the order in which each of their methods is called."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.callbacks import Callback
from megatron.distributed import run_on_each_rank
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
    loop.bar = bar = build_bar(training)
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
    trackers = Trackers(loggers, loop.stopwatch, training.watchdog)
    log = LogCallback(training, bar, loop.stopwatch, [*probes, packing], trackers.on_settled)

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
        ValidationCallback(training, bar, callbacks),  # calls on_validation_end
        *training.method.callbacks(training),
        *evaluations,  # eval_tasks, demo_prompts
        *best,  # keeps the model if validation or evaluation say so
        trackers,  # write the row, to which all above may have added
        *training.user_callbacks,
        SaveCallback(training, callbacks),  # calls on_save; all above have counted the step in their state
        ProgressBarCallback(bar),
        profiler,  # begins and ends its window between two steps
        HistoryCallback(training, metadata),  # status.json, training_history.json, training_summary.json; last
    ]
    return callbacks
