"""The probes that a configuration asks for, and which of them see a step's gradients."""

from collections.abc import Callable

from megatron.training.engine import OnGradients, Parts
from megatron.training.metrics.device_metrics import build_device_metrics
from megatron.training.metrics.metric_probes import Probe
from megatron.training.metrics.noise_scale import NoiseScale
from megatron.training.metrics.parameter_norms import ParameterNorms
from megatron.training.setup import Training


def build_probes(training: Training) -> tuple[list[Probe], Callable[[], OnGradients | None]]:
    """The probes, and who looks at the gradients of the next step. All ranks together, before the first step."""
    args, groups, progress = training.args, training.groups, training.progress
    probes: list[Probe] = []
    sees: list[tuple[OnGradients, int]] = []  # every so many steps
    if ParameterNorms.wanted(args):
        norms = ParameterNorms(training.engine)
        probes.append(norms)
        sees += [(norms.on_gradients, args.log_interval)] if args.log_grad_norm or args.log_grad_pct_zeros else []
    if args.log_gradient_noise_scale:
        assert args.train_batch_size is not None
        noise = NoiseScale(
            args.train_batch_size, args.gradient_noise_scale_n_batches, groups, args.gradient_noise_scale_cpu_offload
        )
        probes.append(noise)
        sees.append((noise.add, 1))

    def on_gradients() -> OnGradients | None:
        asked = [see for see, every in sees if (progress.iteration + 1) % every == 0]

        def show(parts: Parts) -> None:
            for see in asked:
                see(parts)

        return show if asked else None

    devices = build_device_metrics(args, groups, training.logger)
    return [*probes, *([devices] if devices is not None else [])], on_gradients
