"""The probes that a configuration asks for, and when the engine lets them see a step's gradients."""

from __future__ import annotations

from megatron.training.device_metrics import build_device_metrics
from megatron.training.noise_scale import NoiseScale, NoiseScaleProbe
from megatron.training.parameter_norms import ParameterNorms
from megatron.training.probes import Probe
from megatron.training.setup import Training


def build_probes(training: Training) -> list[Probe]:
    """All ranks together, before the first step."""
    args, groups, engine = training.args, training.groups, training.engine
    norms = ParameterNorms(args, groups, engine) if ParameterNorms.wanted(args) else None
    noise = None
    if args.log_gradient_noise_scale:
        assert args.train_batch_size is not None
        scale = NoiseScale(
            args.train_batch_size, args.gradient_noise_scale_n_batches, groups, args.gradient_noise_scale_cpu_offload
        )
        noise = NoiseScaleProbe(scale, engine)

    def on_gradients() -> None:
        if norms is not None and (training.progress.iteration + 1) % args.log_interval == 0:
            norms.on_gradients()
        if noise is not None:
            noise.on_gradients()

    if norms is not None or noise is not None:
        engine.on_gradients = on_gradients
    devices = build_device_metrics(args, groups, training.logger)
    return [probe for probe in (norms, noise, devices) if probe is not None]
