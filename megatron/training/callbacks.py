"""What happens at the end of a step: the log line, validation, saving."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from megatron.training.engine import StepResult
from megatron.training.evaluation import evaluate
from megatron.training.flops import neox_flops, readable_flops
from megatron.training.setup import Training


@dataclass
class Step:
    """One finished optimizer step. row: its metrics, filled by callbacks."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    result: StepResult | None
    row: dict[str, float | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.row |= {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
        }


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
    """NeoX's log line every `log_interval` steps. Losses stay on the device until then."""

    def __init__(self, training: Training, bar: tqdm, stopwatch: Stopwatch) -> None:
        self.training, self.bar, self.stopwatch = training, bar, stopwatch
        self.steps = 0
        self.losses: list[torch.Tensor] = []
        self.skipped = 0
        self.told_memory = False

    def on_step_end(self, step: Step) -> None:
        assert step.result is not None
        self.steps += 1
        self.skipped += int(step.result.skipped)
        if not step.result.skipped:
            self.losses.append(step.result.loss)
        if step.iteration % self.training.args.log_interval:
            return
        # Reading waits for the device, so the lap covers all the work of its steps.
        losses = torch.stack(self.losses).tolist() if self.losses else [math.nan]
        seconds = self.stopwatch.lap() / self.steps
        self._fill(step, losses[-1], seconds)
        if self.training.groups.world_rank == 0:
            self.bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
            with self.bar.external_write_mode():
                self.training.logger.info(self._line(step, sum(losses) / len(losses), seconds))
                self._memory(step.iteration)
        self.steps, self.skipped, self.losses = 0, 0, []

    def _fill(self, step: Step, loss: float, seconds: float) -> None:
        args = self.training.args
        assert step.result is not None
        row = step.row
        row["train/lm_loss"] = loss
        row["train/learning_rate"] = self.training.schedule(step.iteration)
        if step.result.grad_norm is not None:
            row["train/grad_norm"] = float(step.result.grad_norm)
        row["runtime/iteration_time"] = seconds
        row["runtime/samples_per_sec"] = args.train_batch_size / seconds
        row["runtime/steps_per_sec"] = 1.0 / seconds
        row["runtime/tokens_per_sec"] = args.train_batch_size * args.seq_length / seconds
        hardware, model = self._flops_per_second(seconds)
        row["runtime/flops_per_sec_per_gpu"] = hardware
        if args.peak_theoretical_tflops is not None:
            row["runtime/model_flops_utilization"] = model / (args.peak_theoretical_tflops * 1e12)
            row["runtime/hardware_flops_utilization"] = hardware / (args.peak_theoretical_tflops * 1e12)

    def _flops_per_second(self, seconds: float) -> tuple[float, float]:
        """(with recomputation, without), a device."""
        args, world = self.training.args, self.training.groups.world_size
        factor = 4 if args.checkpoint_activations else 3
        return neox_flops(args, factor) / (seconds * world), neox_flops(args, 3) / (seconds * world)

    def _line(self, step: Step, loss: float, seconds: float) -> str:
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
        scale = self.training.engine.loss_scale
        if scale is not None:
            line += f" loss scale: {scale:.1f} |"
        line += f" number of skipped iterations: {self.skipped:3d} |"
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
    args = training.args
    if dataset is None or args.eval_iters == 0:
        return
    found = evaluate(
        training.engine, dataset, args.eval_iters * args.train_batch_size, args, training.groups, training.tokenizer.eod
    )
    name = "validation" if which == "valid" else "test"
    row[f"{name}/lm_loss"] = found.lm_loss
    row[f"{name}/lm_loss_ppl"] = found.perplexity
    row[f"{name}/unigram_entropy"] = found.unigram_entropy
    line = f" {name} results at iteration {iteration} |"
    line += f" lm_loss value: {found.lm_loss:.6E} | lm_loss_ppl value: {found.perplexity:.6E} | "
    with bar.external_write_mode():
        for text in ("-" * (len(line) + 1), line, "-" * (len(line) + 1)):
            training.logger.info(text)
        training.logger.info(f" unigram entropy of these {name} tokens: {found.unigram_entropy:.4f} nats")


class ValidationCallback:
    """Validation loss every `eval_interval` steps and after the last, which is also tested."""

    def __init__(self, training: Training, bar: tqdm) -> None:
        self.training, self.bar = training, bar

    def on_step_end(self, step: Step) -> None:
        last = step.iteration == self.training.args.train_iters
        if last or step.iteration % self.training.args.eval_interval == 0:
            validate(self.training, "valid", step.iteration, step.row, self.bar)
        if last:
            validate(self.training, "test", step.iteration, step.row, self.bar)


class SaveCallback:
    """Checkpoints at multiples (or powers) of `checkpoint_factor`, at `extra_save_iters`, and after the last step."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint is written after this iteration."""
        args = self.training.args
        if iteration in (args.extra_save_iters or ()):
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

    def at_start(self) -> None:
        """The checkpoint of iteration 0, where `extra_save_iters` asks for it."""
        if self.is_due(0):
            self._save()

    def on_step_end(self, step: Step) -> None:
        if self.is_due(step.iteration) or step.iteration == self.training.args.train_iters:
            self._save()

    def _save(self) -> None:
        if self.training.args.save is not None:
            self.training.checkpointer.save(self.training.progress)
