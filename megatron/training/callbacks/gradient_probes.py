"""The probes that a configuration asks for, and which of them see a step's gradients."""

from megatron.callbacks import Callback, OnGradients, Parts, TrainingRun
from megatron.data import Batch
from megatron.training.metrics.device_metrics import build_device_metrics
from megatron.training.metrics.metric_probes import Probe
from megatron.training.metrics.noise_scale import NoiseScale
from megatron.training.metrics.parameter_norms import ParameterNorms
from megatron.training.run import Training


class GradientProbes(Callback):
    """Shows gradients to the probes that measure them. probes: each with the number of steps of which it sees
    one."""

    def __init__(self, probes: list[tuple[OnGradients, int]]) -> None:
        self.probes = probes

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> OnGradients | None:
        """What is called with the gradients of the step that begins; None where no probe sees them."""
        asked = [see for see, every in self.probes if (run.iteration + 1) % every == 0]

        def show(parts: Parts) -> None:
            for see in asked:
                see(parts)

        return show if asked else None


def build_probes(training: Training) -> tuple[list[Probe], GradientProbes]:
    """The probes of the run, and the callback that shows them gradients. All ranks together, before the first
    step."""
    args, groups = training.args, training.groups
    probes: list[Probe] = []
    of_gradients: list[tuple[OnGradients, int]] = []
    if ParameterNorms.wanted(args):
        norms = ParameterNorms(training.engine)
        probes.append(norms)
        if args.log_grad_norm or args.log_grad_pct_zeros:
            of_gradients.append((norms.on_gradients, args.log_interval))
    if args.log_gradient_noise_scale:
        assert args.train_batch_size is not None
        noise = NoiseScale(
            args.train_batch_size, args.gradient_noise_scale_n_batches, groups, args.gradient_noise_scale_cpu_offload
        )
        probes.append(noise)
        of_gradients.append((noise.add, 1))
    devices = build_device_metrics(args, groups, training.logger)
    return [*probes, *([devices] if devices is not None else [])], GradientProbes(of_gradients)
