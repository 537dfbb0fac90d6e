"""The training loop: steps, and what follows each: log, validate, write metrics, save, stop."""

import sys
import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from megatron.data import (
    Batch,
    DataError,
    has_curriculum,
    root_cause,
    row_length,
    rows_per_sample,
    step_length,
    train_loader,
)
from megatron.distributed import run_on_each_rank
from megatron.training.callbacks.best_model import BestCallback
from megatron.training.callbacks.history import write_history
from megatron.training.callbacks.packing_efficiency import Fullness
from megatron.training.callbacks.profiling import StepProfiler
from megatron.training.callbacks.status import note_failure, write_status
from megatron.training.callbacks.step_end import (
    Callback,
    LogCallback,
    SaveCallback,
    Step,
    Stopwatch,
    ValidationCallback,
)
from megatron.training.callbacks.stopping import StopCondition
from megatron.training.metrics.loggers import build_loggers
from megatron.training.metrics.run_metadata import facts_line, run_facts
from megatron.training.metrics.step_probes import build_probes
from megatron.training.nonfinite_guard import NonFiniteError
from megatron.training.setup import Training
from megatron.training.step_results import Outcomes


def batches_of(training: Training) -> Iterator[list[Batch]]:
    """The optimizer steps still to do, as lists of this rank's micro-batches."""
    args, dataset, progress = training.args, training.datasets.train, training.progress
    assert dataset is not None
    needed = progress.consumed_samples + (args.train_iters - progress.iteration) * args.train_batch_size
    if len(dataset) < needed:
        raise DataError(
            f"{len(dataset)} training samples, but {needed} are needed to reach train_iters {args.train_iters} from "
            f"iteration {progress.iteration}: the batch size has changed; lower train_iters"
        )
    next_step = progress.iteration + 1
    return train_loader(
        dataset,
        training.args,
        data_rank=training.groups.rank("data"),
        data_size=training.groups.size("data"),
        consumed_samples=training.progress.consumed_samples,
        eod=training.tokenizer.eod,
        pin_memory=training.groups.device.type == "cuda",
        length=(lambda n: row_length(args, next_step + n)) if has_curriculum(args) else None,
        cut=args.seq_curriculum is not None,
    )


def train(training: Training, callbacks: Sequence[Callback] = ()) -> None:
    """Train to `train_iters`, or until told to stop: log, validate and save on the way, validate, test and save at
    the end. callbacks: asked after validation and before saving, at step 0 and at the end of every step.

    Raises NonFiniteError, after saving the last good state, when a step gave NaN or Inf; NonFiniteStateError in place
    of storing weights or optimizer state that are not finite.
    """
    args, progress, logger = training.args, training.progress, training.logger
    if progress.iteration >= args.train_iters:
        logger.info(f"nothing left to do: train_iters is {args.train_iters}")
        _finish(training, "finished", None)
        return
    best = [BestCallback(training)] if args.save_best is not None else []
    is_chief = training.groups.world_rank == 0
    bar = tqdm(
        total=args.train_iters, initial=progress.iteration, unit="step", file=sys.stderr,
        disable=not (is_chief and sys.stderr.isatty()), dynamic_ncols=True,
    )  # fmt: skip
    stop = StopCondition(args, training.groups, lambda: training.checkpointer.failed)
    run_id, begun = training.checkpointer.run_id, time.monotonic()
    facts = run_facts(args, training.groups, training.engine.stage)
    logger.info(facts_line(facts))
    fullness = Fullness(args, training.groups)
    probes, on_gradients = build_probes(training)
    profiler = StepProfiler(args, training.groups, logger, stop.settle)
    loggers = run_on_each_rank(
        training.groups,
        lambda: build_loggers(args, progress.iteration, run_id, facts, training.groups.world_rank, logger.warning),
    )
    stopwatch = Stopwatch()
    log = LogCallback(training, bar, stopwatch, loggers, [*probes, fullness])
    save, outcomes = SaveCallback(training), Outcomes(training)
    callbacks = [ValidationCallback(training, bar), *callbacks, *best]
    reason: str | None = None
    write_status(training, "running", None)
    try:
        if progress.iteration == 0:
            _before_first_step(training, callbacks, log, save, bar, stop)
        batches = fullness.watch(batches_of(training))
        training.watchdog.now("in the first step")
        while progress.iteration < args.train_iters and reason is None:
            profiler.before_step(progress.iteration)
            result = training.engine.train_step(next(batches), training.schedule(progress.iteration), on_gradients())
            outcomes.settle()  # of the step before
            outcomes.begin(result)
            _advance(training)
            training.watchdog.step_done(progress.iteration)
            length = step_length(args, progress.iteration)
            row = row_length(args, progress.iteration)
            step = Step(
                progress.iteration, progress.consumed_samples, length, result, progress.consumed_tokens, row,
                progress.row_tokens.get(row, 0), stopping=stop.signalled,
            )  # fmt: skip
            log.on_step_end(step)
            reason, timed_save = stop.ask(progress.iteration)
            if stop.write_failed:
                outcomes.settle()
                training.checkpointer.wait()  # raises what the writer ran into
            saves = reason is not None or timed_save or save.is_due(step.iteration)
            for_now = not saves and save.is_due_for_now(step.iteration)
            due = [callback for callback in callbacks if callback.is_due(step)]
            if saves or for_now or due:
                outcomes.settle()
                log.settle(write=False)
                with stopwatch.pause():
                    _call(due, step, bar)
                    log.write(step)
                    progress.validation_loss = step.row.get("validation/lm_loss")
                    if saves or for_now:
                        save.save(for_now)
                    if saves:
                        stop.note_save()
            bar.update()
        log.settle()
        with training.watchdog.phase("saving"):
            training.checkpointer.wait()
    except NonFiniteError as problem:  # has written its own status
        write_history(training, facts, "failed", str(problem), time.monotonic() - begun)
        raise
    except Exception as problem:
        cause = root_cause(problem, args)
        if is_chief:
            note_failure(training, f"{type(cause).__name__}: {cause}".splitlines()[0])
        if cause is not problem:
            raise cause from problem
        raise
    finally:
        stop.close()
        bar.close()
        profiler.close()
        with training.watchdog.phase("closing the loggers"):
            for target in loggers:
                target.close()
    status, reason = ("finished", None) if progress.iteration >= args.train_iters else ("stopped", reason)
    write_history(training, facts, status, reason, time.monotonic() - begun)
    _finish(training, status, reason)


def _before_first_step(
    training: Training,
    callbacks: Sequence[Callback],
    log: LogCallback,
    save: SaveCallback,
    bar: tqdm,
    stop: StopCondition,
) -> None:
    """What a run looks like before it has learned anything."""
    step = Step(0, 0, training.args.seq_length, None, stopping=stop.signalled)
    _call([callback for callback in callbacks if callback.is_due(step)], step, bar)
    log.write(step)
    if save.is_due(0):
        save.save()


def _call(due: Sequence[Callback], step: Step, bar: tqdm) -> None:
    for callback in due:
        bar.clear()  # they may have bars of their own
        callback.on_step_end(step)
    bar.refresh()


def _advance(training: Training) -> None:
    progress = training.progress
    progress.iteration += 1
    progress.validation_loss = None
    progress.consumed_samples += training.args.train_batch_size
    rows = training.args.train_batch_size * rows_per_sample(training.args)
    tokens = rows * step_length(training.args, progress.iteration)
    progress.consumed_tokens += tokens
    if has_curriculum(training.args):
        row, following = (row_length(training.args, progress.iteration + n) for n in (0, 1))
        progress.row_tokens[row] = progress.row_tokens.get(row, 0) + tokens
        if training.args.seq_curriculum is not None and following != row:
            training.logger.info(
                f"seq_curriculum: {progress.row_tokens[row]} tokens were read in rows of {row}; "
                f"rows of {following} from iteration {progress.iteration + 1} on"
            )


def _finish(training: Training, status: str, reason: str | None) -> None:
    write_status(training, status, reason)
    why = f": {reason}" if reason is not None else ""
    training.logger.info(f"run {status} at iteration {training.progress.iteration}{why}")
