"""What happens at the end of a step: the log line, validation, saving."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from tqdm import tqdm

from megatron.data import SampleSet, has_curriculum, rows_per_sample, trains_preferences
from megatron.training.checkpoint.writer import is_hf_due
from megatron.training.engine import StepResult
from megatron.training.evaluation import evaluate, evaluate_objective
from megatron.training.metrics.flops import model_flops, neox_flops, readable_flops
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.metrics.loggers import MetricLogger, metrics
from megatron.training.metrics.metric_probes import Probe
from megatron.training.nonfinite_guard import on_device
from megatron.training.setup import Training


@dataclass
class Step:
    """One finished optimizer step. seq_length: tokens it read of each sample, row_length: in rows of so many, of which
    the run has read row_tokens; row: its metrics, filled by callbacks; stopping: whether a stop signal has come to this
    rank, so that what takes long had better be given up."""

    iteration: int
    consumed_samples: int
    seq_length: int
    result: StepResult | None
    consumed_tokens: int | None = None  # None: all tokens of the samples
    row_length: int = 0
    row_tokens: int = 0
    row: dict[str, float | int] = field(default_factory=dict)
    stopping: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.row["iteration"] = self.iteration
        self.row["consumed_samples"] = self.consumed_samples
        whole = self.consumed_samples * self.seq_length
        self.row["consumed_tokens"] = whole if self.consumed_tokens is None else self.consumed_tokens


class Callback(Protocol):
    """Something that follows some steps, on all ranks together. Step 0 is what a run is before its first step."""

    def is_due(self, step: Step) -> bool:
        """Whether `on_step_end` is called after this step; the same on every rank."""
        ...

    def on_step_end(self, step: Step) -> None:
        """Do it, and add metrics to `step.row`, which is logged afterwards. Its time is none of the step's."""
        ...


class Stopwatch:
    """Wall-clock seconds of training, without what runs under `pause` (validation, saving)."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here is not counted."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begun

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


class LogCallback:
    """NeoX's log line and the metrics row, every `log_interval` steps. Losses stay on the device; those of a logged
    step are read when the next step has been started, or when something else has to wait for the device anyway."""

    def __init__(
        self,
        training: Training,
        bar: tqdm,
        stopwatch: Stopwatch,
        loggers: Sequence[MetricLogger] = (),
        probes: Sequence[Probe] = (),
    ) -> None:
        self.training, self.bar, self.stopwatch, self.loggers, self.probes = training, bar, stopwatch, loggers, probes
        self.steps = 0
        # Tokens of a sample, and of a row: sums over the steps since the last line, means of the pending
        self.tokens, self.length = 0, 0.0
        self.rows, self.row_length = 0, 0.0
        # Of the steps since the last line: losses, the objective's metrics, and whether they were left out.
        self.losses: list[torch.Tensor] = []
        self.metrics: dict[str, list[torch.Tensor]] = {}
        self.skips: list[torch.Tensor] = []
        self.measured: list[str] = []
        self.probed: list[str] = []
        self.pending: tuple[Step, HostCopy, float] | None = None
        self.told_memory = False

    def on_step_end(self, step: Step) -> None:
        """Take the step's values; settle the logged step before it, begin to read this one if it is logged."""
        self.settle()
        assert step.result is not None
        result, device = step.result, step.result.loss.device
        self.steps += 1
        self.tokens += step.seq_length
        self.rows += step.row_length or step.seq_length
        self.skips.append(on_device(result.skipped, device))
        self.losses.append(result.loss.float())
        for name, value in result.metrics.items():
            self.metrics.setdefault(name, []).append(value)
        if step.iteration % self.training.args.log_interval:
            return
        skips = torch.stack(self.skips)
        last = [
            on_device(math.nan if value is None else value, device) for value in (result.grad_norm, result.loss_scale)
        ]
        self.probed, values = [], [skips, torch.stack(self.losses), torch.stack(last)]
        self.measured = list(self.metrics)
        if self.measured:
            found = torch.stack([torch.stack(of_steps) for of_steps in self.metrics.values()])
            values.append(found.masked_fill(skips > 0, math.nan).nanmean(1))
        for probe in self.probes:
            names, measured = probe.values()
            self.probed += names
            values.append(measured.float().to(device))
        reading = HostCopy(torch.cat(values))
        self.pending = (step, reading, self.stopwatch.lap() / self.steps)
        self.length, self.row_length = self.tokens / self.steps, self.rows / self.steps
        self.losses, self.metrics, self.skips, self.steps, self.tokens, self.rows = [], {}, [], 0, 0, 0

    def settle(self, write: bool = True) -> None:
        """Finish the step whose values were on their way: its line, and its row unless the caller adds to it."""
        if self.pending is None:
            return
        (step, reading, seconds), self.pending = self.pending, None
        values = reading.read()
        end = len(values) - len(self.probed)
        first = end - len(self.measured)
        *of_steps, norm, scale = values[:first]
        skips, losses = of_steps[: len(of_steps) // 2], of_steps[len(of_steps) // 2 :]
        losses = [loss for loss, skipped in zip(losses, skips, strict=True) if not skipped] or [math.nan]
        means = {name: value for name, value in zip(self.measured, values[first:end], strict=True) if value == value}
        self._fill(step, losses[-1], norm, scale, seconds)
        step.row.update({f"train/{name}": value for name, value in means.items()})
        step.row.update(zip(self.probed, values[end:], strict=True))
        if self.training.groups.world_rank == 0:
            self.bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
            with self.bar.external_write_mode():
                self.training.logger.info(self._line(step, sum(losses) / len(losses), seconds, means, int(sum(skips))))
                self._memory(step.iteration)
        if write:
            self.write(step)

    def write(self, step: Step) -> None:
        """Hand a step's row to the loggers, if it says more than where the run is."""
        if metrics(step.row):
            for target in self.loggers:
                target.write(step.row)

    def _fill(self, step: Step, loss: float, norm: float, scale: float, seconds: float) -> None:
        args = self.training.args
        row = step.row
        row["train/lm_loss"] = loss
        row["train/learning_rate"] = self.training.schedule(step.iteration)
        row["train/grad_norm"] = norm
        if scale == scale:
            row["train/loss_scale"] = scale
        row["runtime/restarts"] = self.training.watchdog.restarts
        row["runtime/iteration_time"] = seconds
        row["runtime/samples_per_sec"] = args.train_batch_size / seconds
        row["runtime/steps_per_sec"] = 1.0 / seconds
        rows = args.train_batch_size * rows_per_sample(args)
        row["runtime/tokens_per_sec"] = rows * self.length / seconds
        if has_curriculum(args):
            row["curriculum_seqlen"], row["curriculum_tokens"] = step.row_length, step.row_tokens
        device_seconds, factor = seconds * self.training.groups.world_size, 4 if args.checkpoint_activations else 3
        hardware, model = (neox_flops(args, n, self.length, self.row_length) / device_seconds for n in (factor, 3))
        row["runtime/flops_per_sec_per_gpu"] = hardware
        flops = model_flops(args, self.length, self.row_length)
        row["runtime/model_flops_per_sec_per_gpu"] = flops / device_seconds
        if args.peak_theoretical_tflops is not None:
            row["runtime/model_flops_utilization"] = model / (args.peak_theoretical_tflops * 1e12)
            row["runtime/hardware_flops_utilization"] = hardware / (args.peak_theoretical_tflops * 1e12)

    def _line(self, step: Step, loss: float, seconds: float, means: Mapping[str, float], skipped: int) -> str:
        args, row = self.training.args, step.row
        line = f" samples/sec: {row['runtime/samples_per_sec']:.3f} |"
        line += f" iteration {step.iteration:8d}/{args.train_iters:8d} |"
        line += f" elapsed time per iteration (ms): {seconds * 1000.0:.1f} |"
        line += f" learning rate: {row['train/learning_rate']:.3E} |"
        line += f" approx flops per GPU: {readable_flops(row['runtime/flops_per_sec_per_gpu'])} |"
        if "runtime/model_flops_utilization" in row:
            line += f" MFU: {row['runtime/model_flops_utilization'] * 100:.2f}% |"
            line += f" HFU: {row['runtime/hardware_flops_utilization'] * 100:.2f}% |"
        line += f" lm_loss: {loss:.6E} |"
        line += "".join(f" {name}: {value:.6E} |" for name, value in means.items())
        if "train/loss_scale" in row:
            line += f" loss scale: {row['train/loss_scale']:.1f} |"
        line += f" number of skipped iterations: {skipped:3d} |"
        line += f" number of nan iterations: {int(math.isnan(loss)):3d} |"
        return line

    def _memory(self, iteration: int) -> None:
        if self.told_memory or self.training.groups.device.type != "cuda":
            return
        self.told_memory = True
        mega = 1024.0 * 1024.0
        self.training.logger.info(
            f" after {iteration} iterations memory (MB)"
            f" | allocated: {torch.cuda.memory_allocated() / mega}"
            f" | max allocated: {torch.cuda.max_memory_allocated() / mega}"
            f" | reserved: {torch.cuda.memory_reserved() / mega}"
            f" | max reserved: {torch.cuda.max_memory_reserved() / mega}"
        )


def validate(training: Training, which: str, iteration: int, row: dict[str, float | int], bar: tqdm) -> None:
    """Loss on the validation ("valid") or test ("test") set, into the log and the row; nothing without such a set."""
    dataset = {"valid": training.datasets.valid, "test": training.datasets.test}[which]
    if dataset is None or training.args.eval_iters == 0:
        return
    name = "validation" if which == "valid" else "test"
    with training.watchdog.phase(f"computing the {name} loss"):
        found = _results(training, dataset)
    row.update({f"{name}/{metric}": value for metric, value in found.items()})
    entropy = found.pop("unigram_entropy", None)
    values = "".join(f" {metric} value: {value:.6E} |" for metric, value in found.items())
    line = f" {name} results at iteration {iteration} |{values} "
    after = [] if entropy is None else [f" unigram entropy of these {name} tokens: {entropy:.4f} nats"]
    rule = "-" * (len(line) + 1)
    with bar.external_write_mode():
        for text in (rule, line, rule, *after):
            training.logger.info(text)


def _results(training: Training, dataset: SampleSet) -> dict[str, float]:
    """The loss on a set, and the metrics of the objective or of language modelling, by name."""
    args, engine, eod = training.args, training.engine, training.tokenizer.eod
    samples = args.eval_iters * args.train_batch_size
    if trains_preferences(args):
        loss, means = evaluate_objective(engine, dataset, samples, eod)
        return {"lm_loss": loss, **{metric: value for metric, value in means.items() if value == value}}
    detokenize = training.tokenizer.detokenize if args.char_level_ppl else None
    found = evaluate(engine, dataset, samples, eod, detokenize)
    own = {"lm_loss": found.lm_loss, "lm_loss_ppl": found.perplexity, "unigram_entropy": found.unigram_entropy}
    if found.character_perplexity is not None:
        own["lm_loss_char_lvl_ppl"] = found.character_perplexity
    return {**own, **found.metrics}


class ValidationCallback:
    """Validation loss before the first step, every `eval_interval` steps and after the last, which is also tested."""

    def __init__(self, training: Training, bar: tqdm) -> None:
        self.training, self.bar = training, bar

    def is_due(self, step: Step) -> bool:
        """Whether this step is followed by a validation."""
        args = self.training.args
        return step.iteration == args.train_iters or step.iteration % args.eval_interval == 0

    def on_step_end(self, step: Step) -> None:
        """Validate, and test after the last step, if it is time."""
        if self.is_due(step):
            validate(self.training, "valid", step.iteration, step.row, self.bar)
        if step.iteration == self.training.args.train_iters:
            validate(self.training, "test", step.iteration, step.row, self.bar)


class SaveCallback:
    """Checkpoints at multiples (or powers) of `checkpoint_factor`, at `extra_save_iters`, and after the last step."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint is written after this iteration."""
        args = self.training.args
        if args.save is None:
            return False
        if iteration == args.train_iters or iteration in (args.extra_save_iters or ()) or is_hf_due(args, iteration):
            return True
        factor = args.checkpoint_factor
        if not factor or iteration == 0:
            return False
        if args.checkpoint_scale == "linear":
            return iteration % int(factor) == 0
        power = 1.0
        while int(power) < iteration:
            power *= factor
        return int(power) == iteration

    def is_due_for_now(self, iteration: int) -> bool:
        """Whether a checkpoint that stands until the next one is written after this iteration."""
        every = self.training.args.ephemeral_save_interval
        return self.training.args.save is not None and every is not None and iteration % every == 0

    def save(self, for_now: bool = False) -> None:
        """Write a checkpoint of the run as it is now. for_now: one that stands until the next."""
        if self.training.args.save is not None:
            with self.training.watchdog.phase("saving"):
                self.training.checkpointer.save(self.training.progress, ephemeral=for_now)
