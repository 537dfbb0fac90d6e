"""Builds the configured probes (additional metrics), and passes a step's gradients to those that measure
them."""

from collections.abc import Sequence

from megatron.callbacks import Callback, OnGradients, Parts, TrainingRun
from megatron.data import Batch
from megatron.training.metrics.device_metrics import build_device_metrics
from megatron.training.metrics.metric_probes import Probe
from megatron.training.metrics.noise_scale import NoiseScale
from megatron.training.metrics.parameter_norms import ParameterNorms
from megatron.training.run import Training


def joined(hooks: Sequence[OnGradients]) -> OnGradients | None:
    """Returns one function that passes gradients to all hooks; None if there are no hooks."""

    def on_gradients(parts: Parts) -> None:
        for hook in hooks:
            hook(parts)

    return on_gradients if hooks else None


class GradientProbes(Callback):
    """Passes gradients to the probes that measure them.

    probes: (function that takes gradients, interval in steps at which it is called).
    """

    def __init__(self, probes: list[tuple[OnGradients, int]]) -> None:
        self.probes = probes

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> OnGradients | None:
        """Returns the function that takes this step's gradients to the probes that are due; None if none is
        due."""
        return joined([see for see, interval in self.probes if (run.iteration + 1) % interval == 0])


def build_probes(training: Training) -> tuple[list[Probe], GradientProbes]:
    """Returns (probes of the run, callback that passes gradients to them). All ranks call it together, before
    the first step."""
    args, groups = training.args, training.groups
    probes: list[Probe] = []
    gradient_probes: list[tuple[OnGradients, int]] = []
    if ParameterNorms.is_enabled(args):
        norms = ParameterNorms(training.engine)
        probes.append(norms)
        if args.log_grad_norm or args.log_grad_pct_zeros:
            gradient_probes.append((norms.on_gradients, args.log_interval))
    if args.log_gradient_noise_scale:
        assert args.train_batch_size is not None
        noise = NoiseScale(
            args.train_batch_size, args.gradient_noise_scale_n_batches, groups, args.gradient_noise_scale_cpu_offload
        )
        probes.append(noise)
        gradient_probes.append((noise.add, 1))
    devices = build_device_metrics(args, groups, training.logger)
    return [*probes, *([devices] if devices is not None else [])], GradientProbes(gradient_probes)
