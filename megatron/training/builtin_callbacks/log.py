"""Writes the log line and the metrics row of training steps, and draws the progress bar."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice

import torch
from tqdm import tqdm

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.data import has_curriculum, rows_per_sample
from megatron.process.terminal import coloured, for_log_file
from megatron.training.method import LoggedSteps
from megatron.training.metrics.flops import model_flops, neox_flops, readable_flops
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.metrics.metric_probes import Probe
from megatron.training.nonfinite_guard import on_device
from megatron.training.recompute import recomputed_product_share
from megatron.training.run import Training

_STEPS_TO_TELL = 10  # after which the speed of a run is known
_GREEN, _MAGENTA, _BLUE = 32, 35, 34


class LogCallback(Callback):
    """Writes NeoX's log line and the metrics row, every `log_interval` steps.

    Loss and the objective's metrics are means over the steps since the last row, without skipped steps.
    Learning rate and gradient norm are the last step's. Losses stay on the device. They are read when the
    step after the logged one has begun, or when something else has to wait for the device anyway.
    """

    def __init__(
        self, training: Training, probes: Sequence[Probe] = (), on_settled: Callable[[Step], None] = lambda step: None
    ) -> None:
        """Start without steps.

        probes: measure additional metrics in logged steps. on_settled: called when all values of a logged
            step are in its row.
        """
        self.training, self.probes, self._on_settled = training, probes, on_settled
        self.steps = 0
        # Tokens per sample, and per row: sums over the steps since the last line; means for the pending line
        self.tokens, self.length = 0, 0.0
        self.rows, self.row_length = 0, 0.0
        self._started = time.time()
        # Values of the steps since the last line. skips: whether each step was skipped; spikes, untrained:
        # whether it was skipped for a loss far above recent ones, or because it has no trained token.
        self.losses: list[torch.Tensor] = []
        self.metrics: dict[str, list[torch.Tensor]] = {}
        self.skips: list[torch.Tensor] = []
        self.spikes: list[torch.Tensor] = []
        self.untrained: list[torch.Tensor] = []
        self.roles: list[str] = []
        self.measured: list[str] = []
        self.probed: list[str] = []
        self.pending: tuple[Step, HostCopy, list[int], float, list[str]] | None = None
        self._memory_was_logged = False
        self._tells_at: float = training.iteration + _STEPS_TO_TELL

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Finish the pending logged step, and collect this step's values. If this step is logged, begin to
        copy them to the host."""
        self.settle()
        if step.result is None:
            return
        result, device = step.result, step.result.loss.device
        self.steps += 1
        self.tokens += step.seq_length
        self.rows += step.row_length or step.seq_length
        self.skips.append(on_device(result.skipped, device))
        self.spikes.append(on_device(result.spike, device))
        self.untrained.append(on_device(result.untrained, device))
        self.losses.append(result.loss.float())
        self.roles.append(step.role)
        for name, value in result.metrics.items():
            self.metrics.setdefault(name, []).append(value)
        if step.iteration % self.training.args.log_interval:
            return
        skips = torch.stack(self.skips)
        last = [
            on_device(math.nan if value is None else value, device) for value in (result.grad_norm, result.loss_scale)
        ]
        self.probed, values = [], [skips, *map(torch.stack, (self.spikes, self.untrained, self.losses, last))]
        self.measured = list(self.metrics)
        stacked = [torch.stack(step_values) for step_values in self.metrics.values()]
        values.append(torch.stack(stacked).masked_fill(skips > 0, math.nan).nanmean(1) if stacked else skips[:0])
        for probe in self.probes:
            names, measured = probe.values()
            self.probed += names
            values.append(measured.float().to(device))
        reading, lengths = HostCopy(torch.cat(values)), [len(part) for part in values]
        seconds = self.training.loop.stopwatch.lap() / self.steps
        self.pending, step.settled = (step, reading, lengths, seconds, self.roles), False
        self.length, self.row_length = self.tokens / self.steps, self.rows / self.steps
        self.losses, self.metrics, self.skips, self.spikes, self.untrained, self.roles = [], {}, [], [], [], []
        self.steps, self.tokens, self.rows = 0, 0, 0

    def settle(self) -> None:
        """Finish the logged step whose values were being copied to the host: fill its row, write its log
        line."""
        if self.pending is None:
            return
        (step, reading, lengths, seconds, roles), self.pending = self.pending, None
        values = iter(reading.read())
        parts = [list(islice(values, length)) for length in lengths]
        skips, spikes, no_tokens, losses, (norm, scale), measured, *probed = parts
        trained = [(role, loss) for role, loss, skipped in zip(roles, losses, skips, strict=True) if not skipped]
        loss, untrained = self.training.method.mean_loss(trained), int(sum(no_tokens))
        skipped = int(sum(skips)) - untrained
        means = {name: value for name, value in zip(self.measured, measured, strict=True) if value == value}
        self._fill(step, loss, norm, scale, seconds)
        step.row["train/skipped_steps"] = skipped
        if untrained:
            step.row["train/untrained_steps"] = untrained
        if self.training.args.skip_step_above_sigma is not None:
            step.row["train/spikes"] = int(sum(spikes))
        step.row.update({f"train/{name}": value for name, value in means.items()})
        logged = LoggedSteps(step.iteration, roles, trained, self.training.schedule)
        step.row.update(self.training.method.row(self.training.args, logged))
        step.row.update(zip(self.probed, chain.from_iterable(probed), strict=True))
        if self.training.groups.world_rank == 0:
            bar = self.training.loop.bar
            bar.set_description_str(status_text(step.row), refresh=False)
            with bar.external_write_mode():
                self.training.logger.info(for_log_file(self._line(step, loss, seconds, means, skipped, untrained)))
                self._memory(step.iteration)
                self._tell_days(step.iteration, seconds)
        step.settled = True
        self._on_settled(step)

    def _fill(self, step: Step, loss: float, norm: float, scale: float, seconds: float) -> None:
        args = self.training.args
        row = step.row
        row["train/lm_loss"] = loss
        row["train/learning_rate"] = self.training.schedule(step.iteration)
        row["train/grad_norm"] = norm
        if scale == scale:
            row["train/loss_scale"] = scale
        row["runtime/restarts"] = self.training.watchdog.restarts
        if args.on_out_of_memory == "split":
            row["runtime/split_steps"] = sum(n <= step.iteration for n in self.training.loop.split_steps)
        row["runtime/start_time"] = self._started
        row["runtime/iteration_time"] = seconds
        row["runtime/samples_per_sec"] = args.train_batch_size / seconds
        row["runtime/steps_per_sec"] = 1.0 / seconds
        rows = args.train_batch_size * rows_per_sample(args)
        row["runtime/tokens_per_sec"] = rows * self.length / seconds
        if has_curriculum(args):
            row["curriculum_seqlen"], row["curriculum_tokens"] = step.row_length, step.row_tokens
        device_seconds, factor = seconds * self.training.groups.world_size, 3 + recomputed_product_share(args)
        hardware, model = (neox_flops(args, n, self.length, self.row_length) / device_seconds for n in (factor, 3))
        flops = model_flops(args, self.length, self.row_length)
        if args.moe_num_experts > 1:  # GPT-NeoX's formula knows no experts
            hardware, model = (flops * n / 3 / device_seconds for n in (factor, 3))
        row["runtime/flops_per_sec_per_gpu"] = hardware
        row["runtime/model_flops_per_sec_per_gpu"] = flops / device_seconds
        if args.peak_theoretical_tflops is not None:
            row["runtime/model_flops_utilization"] = model / (args.peak_theoretical_tflops * 1e12)
            row["runtime/hardware_flops_utilization"] = hardware / (args.peak_theoretical_tflops * 1e12)

    def _line(
        self, step: Step, loss: float, seconds: float, means: Mapping[str, float], skipped: int, untrained: int
    ) -> str:
        args, row, none_trained = self.training.args, step.row, math.isnan(loss) and untrained and not skipped
        line = f" samples/sec: {row['runtime/samples_per_sec']:.3f} |"
        line += f" iteration {step.iteration:8d}/{args.train_iters:8d} |"
        line += f" elapsed time per iteration (ms): {seconds * 1000.0:.1f} |"
        line += f" learning rate: {row['train/learning_rate']:.3E} |"
        line += f" approx flops per GPU: {readable_flops(row['runtime/flops_per_sec_per_gpu'])} |"
        if "runtime/model_flops_utilization" in row:
            line += f" MFU: {row['runtime/model_flops_utilization'] * 100:.2f}% |"
            line += f" HFU: {row['runtime/hardware_flops_utilization'] * 100:.2f}% |"
        line += " lm_loss: untrained |" if none_trained else f" lm_loss: {loss:.6E} |"
        line += "".join(f" {name}: {value:.6E} |" for name, value in means.items())
        if "train/loss_scale" in row:
            line += f" loss scale: {row['train/loss_scale']:.1f} |"
        line += f" number of skipped iterations: {skipped:3d} |"
        line += f" number of nan iterations: {int(math.isnan(loss) and not none_trained):3d} |"
        return line + (f" number of untrained iterations: {untrained:3d} |" if untrained else "")

    def _tell_days(self, iteration: int, seconds: float) -> None:
        """Once, after ten steps: log how long the run will take if that is more than a day."""
        if iteration < self._tells_at:
            return
        self._tells_at = math.inf
        days = (self.training.args.train_iters - iteration) * seconds / 86400
        if days > 1:
            self.training.logger.info(
                f"at this speed the run ends after {days:.1f} more days: {self.training.args.train_iters - iteration} "
                f"steps of {seconds:.2f} s; train_iters sets their number, `deepy.py plan` finds a faster layout"
            )

    def _memory(self, iteration: int) -> None:
        if self._memory_was_logged or self.training.groups.device.type != "cuda":
            return
        self._memory_was_logged = True
        mega = 1024.0 * 1024.0
        line = (
            f" after {iteration} iterations memory (MB)"
            f" | allocated: {torch.cuda.memory_allocated() / mega}"
            f" | max allocated: {torch.cuda.max_memory_allocated() / mega}"
            f" | reserved: {torch.cuda.memory_reserved() / mega}"
            f" | max reserved: {torch.cuda.max_memory_reserved() / mega}"
        )
        self.training.logger.info(for_log_file(line))


def status_text(row: Mapping[str, float | int]) -> str:
    """Returns a logged step as a short text for a terminal: loss, tokens/s, utilisation, memory."""
    parts = [coloured(f"loss {row['train/lm_loss']:.4f}", _GREEN)]
    parts.append(coloured(f"{row['runtime/tokens_per_sec']:,.0f} tokens/s", _BLUE))
    if "runtime/model_flops_utilization" in row:
        parts.append(coloured(f"MFU {row['runtime/model_flops_utilization']:.0%}", _MAGENTA))
    if torch.cuda.is_initialized():
        parts.append(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return ", ".join(parts)


class ProgressBarCallback(Callback):
    """Advances the status line of a run in a terminal."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Advance the bar by a step."""
        if step.result is not None:
            self.bar.update()

    def close(self) -> None:
        """Stop updating the line; it stays on the terminal as it is."""
        self.bar.close()


def build_bar(training: Training) -> tqdm:
    """Returns the status line of the run. It shows only on rank 0, if stderr is a terminal."""
    is_visible = training.groups.world_rank == 0 and sys.stderr.isatty()
    steps, done = training.args.train_iters, training.progress.iteration
    return tqdm(
        total=steps, initial=done, file=sys.stderr, disable=not is_visible, dynamic_ncols=True, smoothing=0.1,
        bar_format="step {n_fmt}/{total_fmt} {bar:20} {desc}, ETA {remaining}",
    )  # fmt: skip
