"""The callbacks of a run: one list, in the order in which every one of their methods is called."""

from collections.abc import Sequence

from megatron.callbacks import Callback
from megatron.distributed import run_on_each_rank
from megatron.training.callbacks.best_model import BestModelCallback
from megatron.training.callbacks.compiled_graphs import CompiledGraphs
from megatron.training.callbacks.gradient_probes import build_probes
from megatron.training.callbacks.history import HistoryCallback
from megatron.training.callbacks.log import LogCallback, ProgressBarCallback, build_bar
from megatron.training.callbacks.memory_parts import MemoryParts
from megatron.training.callbacks.packing_efficiency import PackingEfficiency
from megatron.training.callbacks.profiling import StepProfiler
from megatron.training.callbacks.router_load import build_router_load
from megatron.training.callbacks.saving import SaveCallback
from megatron.training.callbacks.stopping import StopCallback
from megatron.training.callbacks.trackers import Trackers
from megatron.training.callbacks.validation import ValidationCallback
from megatron.training.metrics.loggers import build_loggers
from megatron.training.metrics.run_metadata import metadata_line, run_metadata
from megatron.training.run import Training
from megatron.training.step_results import StepResults
from megatron.training.unlearning import UnlearningCallback


def build_callbacks(training: Training, results: StepResults, evaluations: Sequence[Callback]) -> list[Callback]:
    """All that takes part in the run beside its steps. All ranks together, before the first step.

    evaluations: those that a program gives the run, such as `eval_tasks` and `demo_prompts`; they come after
    validation and before the row of metrics is written. The user's own (`callbacks`) come after
    ours but for the history, which says how all others ended.
    """
    args, groups, loop, logger, progress = (
        training.args, training.groups, training.loop, training.logger, training.progress
    )  # fmt: skip
    callbacks: list[Callback] = []  # those that call the others' methods hold the list itself
    best = [BestModelCallback(training)] if args.save_best is not None else []
    loop.bar = bar = build_bar(training)
    stop = StopCallback(training, results.settle)
    metadata = run_metadata(args, groups, training.engine.stage)
    logger.info(metadata_line(metadata))
    packing = PackingEfficiency(args, groups)
    probes, gradients = build_probes(training)
    profiler = StepProfiler(args, groups, logger, stop.settle)
    run_id, rank, begun = training.checkpointer.run_id, groups.world_rank, progress.iteration
    loggers = run_on_each_rank(groups, lambda: build_loggers(args, begun, run_id, metadata, rank, logger.warning))
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
        *([UnlearningCallback(progress)] if args.ga_dataset is not None else []),
        log,  # takes the step's values, to be read when the next step has begun
        *router_load,  # likewise, the load of experts
        stop,  # decides whether this step is the last, and whether a save is due
        ValidationCallback(training, bar, callbacks),  # calls on_validation_end
        *evaluations,  # eval_tasks, demo_prompts
        *best,  # keeps the model if validation or evaluation say so
        trackers,  # write the row, to which all above may have added
        SaveCallback(training, callbacks),  # calls on_save
        ProgressBarCallback(bar),
        profiler,  # begins and ends its window between two steps
        *training.user_callbacks,
        HistoryCallback(training, metadata),  # status.json, training_history.json, training_summary.json; last
    ]
    return callbacks
