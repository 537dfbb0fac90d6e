"""Computes and logs validation and test loss within a run."""

import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tqdm import tqdm

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.data import SampleSet, trains_preferences
from megatron.neox_arguments.frozen import FrozenDict
from megatron.process import StopRequested, stop_reason
from megatron.process.terminal import for_log_file, for_terminal, terminal_log
from megatron.training.builtin_callbacks.saving import SaveCallback
from megatron.training.evaluation import ValidationResult, ValidationSums, evaluate, evaluate_objective
from megatron.training.run import Training

Result = TypeVar("Result")
_SHORT = {"lm_loss": "loss", "lm_loss_ppl": "perplexity"}


def validate(training: Training, set_name: str, iteration: int, row: dict[str, float | int]) -> None:
    """Compute the loss on the validation ("valid") or test ("test") sets, and write it to the log and into
    `row`.

    Named sets (`valid_sets`) are logged as `validation/NAME/...`. If there is no other validation set, the
    values of `validation/...` are those of all their tokens together. With `ema_decay`, the averaged weights
    are measured too, as `validation/ema/...` and `validation/ema/NAME/...`. Does nothing without any such
    set, or with `eval_iters: 0`.
    """
    sets = training.datasets
    name, dataset = ("validation", sets.valid) if set_name == "valid" else ("test", sets.test)
    named_sets = sets.valid_sets if set_name == "valid" else {}
    if not (dataset or named_sets) or training.args.eval_iters == 0:
        return
    results = _measured(training, name, dataset, named_sets)
    if training.args.ema_decay is not None:
        with training.engine.averaged_weights():
            results |= _measured(training, f"{name}/ema", dataset, named_sets)
    for title, values in results.items():
        row.update({f"{title}/{metric}": value for metric, value in values.items()})
        _tell(training, title, iteration, values)


def _measured(
    training: Training, name: str, dataset: SampleSet | None, named_sets: Mapping[str, SampleSet]
) -> dict[str, dict[str, float]]:
    """Returns the metrics of the sets by title: `name` for the set, or for all named sets together, and
    `name/KEY` for each named one."""
    results, sums = {}, []
    if dataset is not None:
        results[name] = _run(training, name, lambda: _results(training, dataset, name))
    for key, named_set in named_sets.items():
        title = f"{name}/{key}"
        sums.append(_run(training, title, lambda: _sums(training, named_set, title)))  # noqa: B023 - called at once
        results[title] = _values(sums[-1].result())
    if dataset is None:
        results[name] = _values(functools.reduce(operator.add, sums).result())
    return results


def _run(training: Training, title: str, work: Callable[[], Result]) -> Result:
    bar = training.loop.bar
    status = getattr(bar, "desc", "")  # a bar that is not shown_values has none
    with training.watchdog.phase(f"computing the {title} loss"):
        result = work()
    bar.set_description_str(status, refresh=False)
    return result


def _tell(training: Training, title: str, iteration: int, results: dict[str, float]) -> None:
    shown_values = {metric: value for metric, value in results.items() if metric != "unigram_entropy"}
    entropy = results.get("unigram_entropy")
    values = "".join(f" {metric} value: {value:.6E} |" for metric, value in shown_values.items())
    line = f" {title} results at iteration {iteration} |{values} "
    entropy_lines = [] if entropy is None else [f" unigram entropy of these {title} tokens: {entropy:.4f} nats"]
    rule = "-" * (len(line) + 1)
    with training.loop.bar.external_write_mode():
        for text in (rule, line, rule, *entropy_lines):
            training.logger.info(for_log_file(text))
        if terminal_log():
            short = ", ".join(f"{_SHORT.get(metric, metric)} {value:.4g}" for metric, value in shown_values.items())
            training.logger.info(for_terminal(f"{title} at step {iteration}: {short}"))


def _results(training: Training, dataset: SampleSet, title: str) -> dict[str, float]:
    """Returns the loss (`lm_loss`) and the other metrics of a dataset, by name. Shows the progress.

    title: names the dataset for people.
    """
    args, engine, eod = training.args, training.engine, training.tokenizer.eod
    samples = args.eval_iters * args.train_batch_size
    if trains_preferences(args):
        loss, means = evaluate_objective(engine, dataset, samples, eod, _look(training, dataset, title))
        return {"lm_loss": loss, **{metric: value for metric, value in means.items() if value == value}}
    result = _sums(training, dataset, title).result()
    validated = {}
    if engine.objective.validated:
        means = evaluate_objective(engine, dataset, samples, eod, _look(training, dataset, title))[1]
        validated = {name: means[name] for name in engine.objective.validated}
    return _values(result, validated)


def _sums(training: Training, dataset: SampleSet, title: str) -> ValidationSums:
    """Returns the sums of loss and metrics of a dataset of texts. Shows the progress."""
    args, look = training.args, _look(training, dataset, title)
    detokenize = training.tokenizer.detokenize if args.char_level_ppl else None
    samples = args.eval_iters * args.train_batch_size
    return evaluate(training.engine, dataset, samples, training.tokenizer.eod, detokenize, look)


def _values(result: ValidationResult, validated: Mapping[str, float] = FrozenDict()) -> dict[str, float]:
    """Returns the metrics of a validation by name. validated: those of the objective."""
    values = {"lm_loss": result.lm_loss, "lm_loss_ppl": result.perplexity, "unigram_entropy": result.unigram_entropy}
    if result.character_perplexity is not None:
        values["lm_loss_char_lvl_ppl"] = result.character_perplexity
    return {**values, **validated, **result.metrics}


def _look(training: Training, dataset: SampleSet, title: str) -> Callable[[], None]:
    """Returns a function that looks for a stop signal and shows the progress of a validation."""
    batch = training.args.train_batch_size
    steps = -(-min(training.args.eval_iters * batch, len(dataset)) // batch)

    def show(share: float, time_left: str) -> None:
        training.loop.bar.set_description_str(f"{title} {share:.0%}, {time_left} left")

    return with_progress(training.loop.look_for_stop, steps, show)


def with_progress(
    look_for_stop: Callable[[], None], steps: int, show: Callable[[float, str], None]
) -> Callable[[], None]:
    """Returns `look_for_stop` that also shows progress each time it is called.

    steps: how many times it is called; it may be called more often. show: called with the share of the work
    that is done, and the time that is left, such as 01:30.
    """
    start, calls = time.monotonic(), 0

    def look() -> None:
        nonlocal calls
        if calls:
            share = min(calls / steps, 1.0)
            seconds = (time.monotonic() - start) * (1 - share) / share
            show(share, tqdm.format_interval(seconds))
        calls += 1
        look_for_stop()

    return look


_NO_WORK = {Callback.on_validation_end, SaveCallback.on_validation_end}  # methods that evaluate nothing


class ValidationCallback(Callback):
    """Computes the validation loss before the first step, every `eval_interval` steps and after the last.

    After the last step it also computes the test loss. Then it calls `on_validation_end` of all callbacks.
    Once a stop signal has come, it skips the remaining work, and the run ends with this step.
    """

    def __init__(self, training: Training, callbacks: Sequence[Callback]) -> None:
        self.training, self.callbacks = training, callbacks

    def is_due(self, iteration: int) -> bool:
        """Returns whether a validation follows this iteration: a multiple of `eval_interval`, or the last
        one."""
        args = self.training.args
        return iteration == args.train_iters or iteration % args.eval_interval == 0

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Compute the validation loss if it is due, and after the last step the test loss."""
        if not self.is_due(step.iteration):
            return
        loop = self.training.loop
        if loop.stop_signal:
            if self._has_work():
                loop.gave_up = True
                run.logger.info(f"no validation at iteration {step.iteration}: {loop.stop_reason} ends the run")
            return
        with run.pause():
            if self._runs_to_end(lambda: self._validate(step)):
                for callback in self.callbacks:
                    loop.bar.clear()  # they may have bars of their own
                    self._runs_to_end(lambda: callback.on_validation_end(run, step))  # noqa: B023 - called at once
            loop.agree_on_stop()

    def _has_work(self) -> bool:
        """Returns whether a validation has work: validation or test data, or callbacks that evaluate at its
        end."""
        sets, args = self.training.datasets, self.training.args
        methods = {type(callback).on_validation_end for callback in self.callbacks}
        return bool(args.eval_iters and (sets.valid or sets.valid_sets or sets.test)) or not methods <= _NO_WORK

    def _validate(self, step: Step) -> None:
        validate(self.training, "valid", step.iteration, step.row)
        if step.iteration == self.training.args.train_iters:
            validate(self.training, "test", step.iteration, step.row)

    def _runs_to_end(self, work: Callable[[], None]) -> bool:
        """Run `work`, a part of the validation; return False if a stop signal interrupted it.

        All ranks return the same. The signal then ends the run with this step.
        """
        loop = self.training.loop
        try:
            work()
        except StopRequested as stop:
            loop.stop_signal, loop.gave_up = stop.number, True
            loop.stop_reason = loop.stop_reason or stop_reason(stop.number)
            return False
        return True
