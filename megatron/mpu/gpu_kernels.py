"""Lists, for each kernel, the GPUs on which it has run and agreed with plain torch code (`tests/gpu`).

A setting of `auto` chooses a kernel only on the GPUs listed for it. The user can select any kernel by its
setting. The results of these runs are in benchmarks/results.
"""

from collections.abc import Mapping

import torch

Capability = tuple[int, int]
"""CUDA compute capability, (major, minor)."""

HOPPER: Capability = (9, 0)
EVERY_GPU: tuple[Capability, ...] = ()
"""Marks a kernel as tested on every GPU: it ran on Hopper, and torch or Triton builds it from the same source
for all."""

# The keys are the settings that select a kernel. Kernels that are not listed have run on no GPU:
# attention_backend flash3, flash4, flash_attn and transformer_engine; precision_fp8: mxfp8;
# async_tensor_parallel: true; te_backend: transformer_engine; apex: true; mamba_backend mamba_ssm and fla.
# decode_cuda_graphs: true is not listed either: it passed its tests on an H200, but was not timed there.
RUN_ON: Mapping[str, tuple[Capability, ...]] = {
    "attention_backend: flash": EVERY_GPU,
    "attention_backend: efficient": EVERY_GPU,
    "attention_backend: flex": EVERY_GPU,
    "attention_backend: math": EVERY_GPU,
    "attention_backend: cudnn": (HOPPER,),  # cuDNN has separate kernels for each generation of GPUs
    "compile: block": EVERY_GPU,
    "compile: block-max": (HOPPER,),  # may use Triton templates that exist for one generation of GPUs only
    "fused_update: true": EVERY_GPU,
    "precision_fp8: tensorwise": (HOPPER,),  # cuBLAS has separate FP8 kernels for each generation of GPUs
    "precision_fp8: rowwise": (HOPPER,),
    "precision_fp8: te": (HOPPER,),
}


def capability_of(device: torch.device) -> Capability | None:
    """Returns the CUDA compute capability of a GPU as (major, minor); None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def not_run_on(setting: str, capability: Capability | None) -> str | None:
    """Returns why `auto` must not choose a kernel on a GPU; None if the kernel has been tested there.

    setting: `key: value` that selects the kernel, such as `attention_backend: cudnn`; the returned text names
        it.
    capability: of the GPU; None for a CPU, where every kernel is allowed.
    """
    capabilities = RUN_ON.get(setting)
    if capability is None or capabilities == EVERY_GPU or capability in (capabilities or ()):
        return None
    versions = " and ".join(".".join(map(str, version)) for version in capabilities or ())
    return (
        f"not tested on this GPU ({f'only on compute capability {versions}' if versions else 'on no GPU yet'}); "
        f"set {setting} to use it anyway"
    )
