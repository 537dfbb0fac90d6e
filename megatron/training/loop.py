"""The training loop takes steps up to `train_iters`; the callbacks around them, listed in
`callbacks/build.py`, decide when to save, to evaluate and to stop."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from megatron.callbacks import Callback, OnGradients, Parts, Step, StepResult
from megatron.data import (
    Batch,
    DataError,
    Role,
    SampleSet,
    has_curriculum,
    root_cause,
    row_length,
    rows_per_sample,
    step_length,
    train_loader,
)
from megatron.distributed import run_on_each_rank
from megatron.neox_arguments.values.unlearning import ascent_steps
from megatron.process import StopRequested, stop_signals_taken
from megatron.training.callbacks.build import build_callbacks
from megatron.training.callbacks.saving import SaveCallback
from megatron.training.callbacks.status import ended_as, say_ending, write_status
from megatron.training.distillation.on_policy import Answer, on_policy_steps
from megatron.training.out_of_memory import explained
from megatron.training.run import Training
from megatron.training.step_results import StepResults
from megatron.training.unlearning import after_ascent, lr_scale, unlearning_steps


def batches_of(training: Training) -> Iterator[list[Batch]]:
    """The optimizer steps still to do, as lists of this rank's micro-batches."""
    args, dataset, progress = training.args, training.datasets.train, training.progress
    assert dataset is not None
    ordinary = args.train_iters - progress.iteration - ascent_steps(args, progress.iteration, args.train_iters)
    needed = progress.consumed_samples + ordinary * args.train_batch_size
    if len(dataset) < needed:
        raise DataError(
            f"{len(dataset)} training samples, but {needed} are needed to reach train_iters {args.train_iters} from "
            f"iteration {progress.iteration}: the batch size has changed; lower train_iters"
        )
    next_step = progress.iteration + 1

    def load(dataset: SampleSet, consumed: int, role: Role = "train") -> Iterator[list[Batch]]:
        return train_loader(
            dataset,
            args,
            role=role,
            data_rank=training.groups.rank("data"),
            data_size=training.groups.size("data"),
            consumed_samples=consumed,
            eod=training.tokenizer.eod,
            pin_memory=training.groups.device.type == "cuda",
            length=(lambda n: row_length(args, next_step + n)) if has_curriculum(args) else None,
            cut=args.seq_curriculum is not None,
        )

    steps, sets = load(dataset, progress.consumed_samples), training.datasets
    if sets.forget is None:
        return steps
    forget = load(sets.forget, progress.unlearning.samples, "forget")
    retain = load(sets.retain, progress.unlearning.samples, "retain") if sets.retain is not None else None
    return unlearning_steps(args, progress, training.engine, steps, forget, retain)


def train(
    training: Training,
    evaluations: Sequence[Callback] = (),
    answer: Answer | None = None,
    operations: Sequence[Callback] = (),
    rollouts: Iterable[list[Batch]] | None = None,
) -> None:
    """Train to `train_iters`, or until the run is to stop. evaluations: callbacks of the program, called
    after validation and before saving; the user's own are in `training`. answer: writes the answers of steps
    on policy (`distillation.lmbda`), by the model as it is then. operations: callbacks called after
    evaluations, and begun and closed also where nothing is left to do: a checkpoint may be to publish.
    rollouts: the micro-batches of this rank of each step still to do, where samples are written and not read
    (`dataset_impl: online`).

    A stop signal is acknowledged at once and obeyed after the step, or between the batches of whatever else
    takes long; one that came while the run started, before its first step.

    Raises NonFiniteError, after saving the last good state, when a step gave NaN or Inf; NonFiniteStateError
    in place of storing weights or optimizer state that are not finite.
    """
    with stop_signals_taken(lambda: f"{training.watchdog.doing}; as soon as that can be left the run saves and ends"):
        if training.iteration < training.args.train_iters or ended_as(training, "stopped"):
            _train(training, [*evaluations, *operations], answer, rollouts)
        else:
            _end_again(training, operations)


def _end_again(training: Training, operations: Sequence[Callback]) -> None:
    """Write the status and call the callbacks of a run that has taken all of its steps."""
    training.logger.info(f"nothing left to do: train_iters is {training.args.train_iters}")
    if not ended_as(training, "finished"):  # else the file keeps when that was
        write_status(training, "finished", None)
    say_ending(training, "finished", None)
    for callback in operations:
        callback.on_train_start(training)
    for callback in (*training.user_callbacks, *operations):
        callback.close()


def _train(
    training: Training, others: Sequence[Callback], answer: Answer | None, rollouts: Iterable[list[Batch]] | None
) -> None:
    """`train`, with steps left to do, or validations that were given up after the last one."""
    args, progress, loop, results = training.args, training.progress, training.loop, StepResults(training)
    callbacks = build_callbacks(training, results, others)
    try:
        for callback in callbacks:
            callback.on_train_start(training)
        loop.agree_on_stop()  # a signal that came while the run started
        if loop.stop_reason is not None:
            _stop_before_step(training, callbacks)
        elif progress.iteration in (0, args.train_iters):  # before it has learned anything; else what was given up
            _end_step(training, callbacks, Step(progress.iteration, progress.consumed_samples, args.seq_length, None))
        if loop.stop_reason is None and progress.iteration < args.train_iters:
            _take_steps(training, callbacks, results, answer, rollouts)
        loop.settle()
        with training.watchdog.phase("saving"):
            training.checkpointer.wait()
        gave_up = loop.gave_up or training.checkpointer.gave_up_export
        is_whole = progress.iteration >= args.train_iters and not gave_up
        loop.ending = ("finished", None) if is_whole else ("stopped", loop.stop_reason)
    except Exception as problem:
        cause = explained(
            root_cause(problem, args), args, training.groups.world_rank, training.groups.device,
            training.watchdog.doing, training.engine.tensors,
        )  # fmt: skip
        _report_error(training, callbacks, cause)
        if cause is not problem:
            raise cause from problem
        raise
    finally:
        _close(training, callbacks)


def _take_steps(
    training: Training,
    callbacks: Sequence[Callback],
    results: StepResults,
    answer: Answer | None,
    rollouts: Iterable[list[Batch]] | None,
) -> None:
    """Steps up to `train_iters`, or until a stop is agreed on."""
    args, progress, loop = training.args, training.progress, training.loop
    batches = batches_of(training) if rollouts is None else iter(rollouts)
    if args.distillation is not None and args.distillation["lmbda"] > 0.0:
        if answer is None:
            raise ValueError("distillation.lmbda: training needs a function that answers prompts")
        batches = on_policy_steps(args, progress, batches, answer)
    training.watchdog.now("in the first step")
    loop.stopwatch.lap()  # steps are timed from here on
    while progress.iteration < args.train_iters and loop.stop_reason is None:
        done = _train_step(training, callbacks, batches)
        if done is None:
            _stop_before_step(training, callbacks)
            return
        role, result, width = done
        results.settle()  # of the step before
        results.begin(result)
        if role == "forget":
            progress.unlearning = after_ascent(args, progress.unlearning, result)
        _advance(training, role, width)
        training.watchdog.step_done(progress.iteration)
        _end_step(training, callbacks, _finished_step(training, role, result, width))


def _train_step(
    training: Training, callbacks: Sequence[Callback], batches: Iterator[list[Batch]]
) -> tuple[Role, StepResult, int | None] | None:
    """What the next step's data are, its result, with the gradients shown to the callbacks that ask for them,
    and how many tokens its rows have where no key says so. None where there are no more steps, or a stop
    signal came while the model wrote the next one's samples."""
    step = list[list[Batch]]()  # popped, so that the engine alone holds what it moved to the device
    with suppress(StopRequested):
        step += itertools.islice(batches, 1)
    if not step:
        return None
    role, width = step[0][0].role, None if training.args.rollout is None else step[0][0].tokens.shape[1]
    hooks = [hook for callback in callbacks if (hook := callback.on_step_start(training, step[0])) is not None]
    lr = training.schedule(training.progress.iteration) * lr_scale(training.args, role)
    return role, training.engine.train_step(step.pop(), lr, _joined(hooks)), width


def _stop_before_step(training: Training, callbacks: Sequence[Callback]) -> None:
    """End the run, with a checkpoint, where a stop signal has come before its next step."""
    save = next(one for one in callbacks if isinstance(one, SaveCallback))
    training.loop.agree_on_stop()
    if training.loop.stop_reason is None:
        raise RuntimeError(f"the samples ended after {training.iteration} of {training.args.train_iters} steps")
    save.on_step_end(training, Step(training.iteration, training.consumed_samples, 0, None))


def _joined(hooks: Sequence[OnGradients]) -> OnGradients | None:
    """One function for all that look at the gradients; None where nobody does."""

    def on_gradients(parts: Parts) -> None:
        for hook in hooks:
            hook(parts)

    return on_gradients if hooks else None


def _finished_step(training: Training, role: Role, result: StepResult, width: int | None) -> Step:
    args, progress = training.args, training.progress
    row = width or row_length(args, progress.iteration)
    sets = 2 if role == "forget" and args.gd_mode else 1  # that it read a sample of
    return Step(
        progress.iteration, progress.consumed_samples, sets * (width or step_length(args, progress.iteration)), result,
        progress.consumed_tokens, row, progress.row_tokens.get(row, 0), role,
    )  # fmt: skip


def _end_step(training: Training, callbacks: Sequence[Callback], step: Step) -> None:
    for callback in callbacks:
        callback.on_step_end(training, step)


def _report_error(training: Training, callbacks: Sequence[Callback], problem: Exception) -> None:
    """Tell the callbacks of it; one that fails over it does not hide it."""
    for callback in callbacks:
        try:
            callback.on_error(training, problem)
        except Exception as another:
            training.logger.warning(f"{type(callback).__name__}.on_error: {type(another).__name__}: {another}")


def _close(training: Training, callbacks: Sequence[Callback]) -> None:
    """Close all callbacks. Raises the first problem that one had with it on any rank, before the last of the
    list, the history, calls the run finished; only warns where the run has failed before."""
    problems: list[Exception] = []
    *others, history = callbacks
    for callback in others:
        try:
            callback.close()
        except Exception as problem:
            problems.append(problem)
            if training.loop.ending is None:
                training.logger.warning(f"{type(callback).__name__}.close: {type(problem).__name__}: {problem}")

    def raise_first() -> None:
        if problems:
            raise problems[0]

    if training.loop.ending is not None:
        run_on_each_rank(training.groups, raise_first)
        history.close()


def _advance(training: Training, role: Role, width: int | None) -> None:
    progress = training.progress
    progress.iteration += 1
    progress.validation_loss = None
    if role == "forget":
        return
    progress.consumed_samples += training.args.train_batch_size
    rows = training.args.train_batch_size * rows_per_sample(training.args)
    tokens = rows * (width or step_length(training.args, progress.iteration))
    progress.consumed_tokens += tokens
    if has_curriculum(training.args):
        row, following = (row_length(training.args, progress.iteration + n) for n in (0, 1))
        progress.row_tokens[row] = progress.row_tokens.get(row, 0) + tokens
        if training.args.seq_curriculum is not None and following != row:
            training.logger.info(
                f"seq_curriculum: {progress.row_tokens[row]} tokens were read in rows of {row}; "
                f"rows of {following} from iteration {progress.iteration + 1} on"
            )
