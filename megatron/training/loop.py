"""Runs the training loop, which takes optimizer steps up to `train_iters`.

The callbacks in `builtin_callbacks/build.py`, called around each step, decide when to save and to stop.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from megatron.callbacks import Callback, Step, StepResult
from megatron.data import (
    Batch,
    DataError,
    SampleSet,
    has_curriculum,
    root_cause,
    row_length,
    rows_per_sample,
    step_length,
    train_loader,
)
from megatron.data.context_parts import ContextLayout, part_of
from megatron.distributed import run_on_each_rank
from megatron.process import StopRequested, capture_stop_signals
from megatron.training.builtin_callbacks.build import build_callbacks, name_callbacks, states_of
from megatron.training.builtin_callbacks.data_files import explained_by_change
from megatron.training.builtin_callbacks.gradient_probes import joined
from megatron.training.builtin_callbacks.status import ended_as, say_ending, write_status
from megatron.training.method import StepData
from megatron.training.out_of_memory import OutOfMemoryError, explained
from megatron.training.run import Training
from megatron.training.split_steps import after_out_of_memory, pieces, read_split_steps
from megatron.training.step_results import StepResults


def steps_of(training: Training) -> Iterator[StepData]:
    """Returns an iterator over the data of the steps that are left, one item per step.

    Raises DataError if the training set has too few samples for them.
    """
    args, dataset, progress = training.args, training.datasets.train, training.progress
    from_training_set = training.method.num_training_steps(args, progress.iteration, args.train_iters)
    required_samples = progress.consumed_samples + from_training_set * args.train_batch_size
    if dataset is not None and len(dataset) < required_samples:
        raise DataError(
            f"the data gives {len(dataset)} training samples, but {required_samples} are needed to reach train_iters "
            f"{args.train_iters} from iteration {progress.iteration} at the present batch size; lower train_iters"
        )
    next_step, split = progress.iteration + 1, training.loop.split_steps

    def load(
        dataset: SampleSet, consumed: int, collate: Callable[..., Batch] | None = None, num_workers: int | None = None
    ) -> Iterator[list[Batch]]:
        return train_loader(
            dataset,
            args,
            data_rank=training.groups.rank("data"),
            data_size=training.groups.size("data"),
            consumed_samples=consumed,
            eod=training.tokenizer.eod,
            collate=collate,
            num_workers=num_workers,
            pin_memory=training.groups.device.type == "cuda",
            length=(lambda n: row_length(args, next_step + n)) if has_curriculum(args) else None,
            split_rows=args.seq_curriculum is not None,
            pieces=(lambda n: pieces(args) if next_step + n in split else 1) if split else None,
            take_part=partial(part_of, layout=ContextLayout.from_args(args), rank=training.groups.rank("context")),
        )

    return training.method.steps(training, load)


def train(training: Training, callbacks: Sequence[Callback] = ()) -> None:
    """Train to `train_iters`, or until a stop is requested.

    callbacks: those that the program adds, called after validation and before saving. The user's own
        callbacks are in `training`.

    A stop signal is reported at once. The run then stops after the present step, or between batches of other
    long work. A signal that came during start-up stops the run before its first step.

    Raises NonFiniteError after a step with NaN or Inf, once the last good state is saved. Raises
    NonFiniteStateError instead of saving weights or optimizer state that are not finite.
    """
    steps_are_left = training.iteration < training.args.train_iters
    try:
        if steps_are_left:
            training.method.begin(training)
        with capture_stop_signals(
            lambda: f"{training.watchdog.activity}; the run saves and ends as soon as this work can be interrupted"
        ):
            if steps_are_left or ended_as(training, "stopped"):
                _train(training, callbacks)
            else:
                _close_completed_run(training, callbacks)
    except DataError as problem:  # also of the summary that is written at the end
        cause = explained_by_change(problem, training.checkpointer)
        if cause is problem:
            raise
        raise cause from problem
    finally:
        training.method.close()


def _close_completed_run(training: Training, callbacks: Sequence[Callback]) -> None:
    """Write the status and call the callbacks of a run that has taken all of its steps."""
    training.logger.info(f"nothing left to do: train_iters is {training.args.train_iters}")
    if not ended_as(training, "finished"):  # else status.json keeps the time at which the run finished
        write_status(training, "finished", None)
    say_ending(training, "finished", None)
    if (local := training.local_saves) is not None and local.is_leader:
        local.remove()
    everyone = (*training.user_callbacks, *callbacks)
    with ExitStack() as closing:  # which closes the others too, if one raises
        for callback in reversed(everyone):
            closing.callback(callback.close)
        for callback in everyone:
            callback.on_completed_run(training)


def _train(training: Training, program_callbacks: Sequence[Callback]) -> None:
    """Train a run that has steps left, or whose last validations were skipped by a stop signal."""
    args, progress, loop, results = training.args, training.progress, training.loop, StepResults(training)
    callbacks = build_callbacks(training, results, program_callbacks)
    callbacks_by_name = name_callbacks(callbacks)
    training.checkpointer.callback_states = lambda: states_of(callbacks_by_name)
    try:
        for name, state in progress.callback_states.items():
            if name in callbacks_by_name:
                callbacks_by_name[name].load_state(state)
        for callback in callbacks:
            callback.on_train_start(training)
        states_of(callbacks_by_name)  # raises now, not at the first checkpoint
        loop.agree_on_stop()  # a signal that came while the run started
        if loop.stop_reason is not None:
            _stop_before_step(training, callbacks)
        elif progress.iteration in (0, args.train_iters):  # validate before the first step, or after the last
            _end_step(training, callbacks, Step(progress.iteration, progress.consumed_samples, args.seq_length, None))
        if loop.stop_reason is None and progress.iteration < args.train_iters:
            _take_steps(training, callbacks, results)
        loop.settle()
        with training.watchdog.phase("saving"):
            training.checkpointer.wait()
        gave_up = loop.gave_up or training.checkpointer.gave_up_export
        is_complete = progress.iteration >= args.train_iters and not gave_up
        loop.ending = ("finished", None) if is_complete else ("stopped", loop.stop_reason)
    except Exception as problem:
        data_cause = explained_by_change(root_cause(problem, args), training.checkpointer)
        cause = explained(
            data_cause, args, training.groups.world_rank, training.groups.device,
            training.watchdog.activity, training.engine.tensors,
        )  # fmt: skip
        if isinstance(cause, OutOfMemoryError):
            cause = after_out_of_memory(training, cause)
        _report_error(training, callbacks, cause)
        if cause is not problem:
            raise cause from problem
        raise
    finally:
        _close(training, callbacks)


def _take_steps(training: Training, callbacks: Sequence[Callback], results: StepResults) -> None:
    """Take steps up to `train_iters`, or until all ranks agree on a stop."""
    args, progress, loop = training.args, training.progress, training.loop
    if args.on_out_of_memory == "split":
        loop.split_steps = read_split_steps(training)
    steps = steps_of(training)
    training.watchdog.now("in the first step")
    loop.stopwatch.lap()  # steps are timed from here on
    while progress.iteration < args.train_iters and loop.stop_reason is None:
        data: StepData | None = None
        with suppress(StopRequested):  # a stop signal while the model generated the step's samples
            data = next(steps, None)
        if data is None:
            _stop_before_step(training, callbacks)
            return
        loop.step_under_way = progress.iteration + 1
        hooks = [hook for callback in callbacks if (hook := callback.on_step_start(training, data.batches)) is not None]
        lr = training.schedule(progress.iteration) * data.lr_factor
        result = training.engine.train_step(data.take(), lr, joined(hooks))
        results.settle()  # the result of the previous step
        results.begin(result)
        training.method.after_step(training, data, result)
        _advance(training, data)
        loop.step_under_way = None
        training.watchdog.step_done(progress.iteration)
        _end_step(training, callbacks, _finished_step(training, data, result))


def _stop_before_step(training: Training, callbacks: Sequence[Callback]) -> None:
    """Save a checkpoint and end the run, because a stop signal has come before its next step."""
    training.loop.agree_on_stop()
    if training.loop.stop_reason is None:
        raise RuntimeError(
            f"no data is left after {training.iteration} of {training.args.train_iters} steps, though no stop was "
            "requested; report this as a bug"
        )
    for callback in callbacks:
        callback.on_stop_before_step(training, Step(training.iteration, training.consumed_samples, 0, None))


def _finished_step(training: Training, data: StepData, result: StepResult) -> Step:
    args, progress = training.args, training.progress
    row = data.row_length or row_length(args, progress.iteration)
    return Step(
        progress.iteration, progress.consumed_samples,
        data.num_sets * (data.row_length or step_length(args, progress.iteration)), result,
        progress.consumed_tokens, row, progress.row_tokens.get(row, 0), data.role,
    )  # fmt: skip


def _end_step(training: Training, callbacks: Sequence[Callback], step: Step) -> None:
    for callback in callbacks:
        callback.on_step_end(training, step)


def _report_error(training: Training, callbacks: Sequence[Callback], problem: Exception) -> None:
    """Call `on_error` of all callbacks. An exception that a callback raises is logged and does not replace
    `problem`."""
    for callback in callbacks:
        try:
            callback.on_error(training, problem)
        except Exception as callback_error:
            training.logger.warning(
                f"{type(callback).__name__}.on_error raised {type(callback_error).__name__}: {callback_error}"
            )


def _close(training: Training, callbacks: Sequence[Callback]) -> None:
    """Close all callbacks; the last one, the history, writes how the run has ended.

    If `close` of another callback raises on any rank, that exception is raised and the history stays open. In
    a run that has already failed, such exceptions are only logged, and the history stays as it is.
    """
    problems: list[Exception] = []
    *preceding, history = callbacks
    for callback in preceding:
        try:
            callback.close()
        except Exception as problem:
            problems.append(problem)
            if training.loop.ending is None:
                training.logger.warning(f"{type(callback).__name__}.close raised {type(problem).__name__}: {problem}")

    def raise_first() -> None:
        if problems:
            raise problems[0]

    if training.loop.ending is not None:
        run_on_each_rank(training.groups, raise_first)
        history.close()


def _advance(training: Training, data: StepData) -> None:
    progress = training.progress
    progress.iteration += 1
    progress.validation_loss = None
    if not data.reads_training_set:
        return
    progress.consumed_samples += training.args.train_batch_size
    rows = training.args.train_batch_size * rows_per_sample(training.args)
    tokens = rows * (data.row_length or step_length(training.args, progress.iteration))
    progress.consumed_tokens += tokens
    if has_curriculum(training.args):
        row, following = (row_length(training.args, progress.iteration + n) for n in (0, 1))
        progress.row_tokens[row] = progress.row_tokens.get(row, 0) + tokens
        if training.args.seq_curriculum is not None and following != row:
            training.logger.info(
                f"seq_curriculum: {progress.row_tokens[row]} tokens were read in rows of {row}; "
                f"rows of {following} from iteration {progress.iteration + 1} on"
            )
