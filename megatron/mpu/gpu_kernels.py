"""Lists the GPUs on which each kernel has run and agreed with plain computations (`tests/gpu`).

A setting of `auto` takes no other kernel. The tables of these runs are in benchmarks/results.
"""

from collections.abc import Mapping

import torch

Capability = tuple[int, int]
"""CUDA compute capability, (major, minor)."""

HOPPER: Capability = (9, 0)
EVERY_GPU: tuple[Capability, ...] = ()
"""Kernels that ran on Hopper and are built from one source for every GPU, by torch or by Triton."""

# By the setting that selects the kernel explicitly. These have run on no GPU: attention by flash3,
# flash4, flash_attn and transformer_engine; precision_fp8: mxfp8; async_tensor_parallel: true; te_backend:
# transformer_engine; apex: true; mamba_backend: mamba_ssm and fla. decode_cuda_graphs: true has passed on an
# H200 and has not been timed there.
RUN_ON: Mapping[str, tuple[Capability, ...]] = {
    "attention_backend: flash": EVERY_GPU,
    "attention_backend: efficient": EVERY_GPU,
    "attention_backend: flex": EVERY_GPU,
    "attention_backend: math": EVERY_GPU,
    "attention_backend: cudnn": (HOPPER,),  # it has kernels of its own for each generation of GPUs
    "compile: block": EVERY_GPU,
    "compile: block-max": (HOPPER,),  # it may take templates that Triton has for a generation alone
    "fused_update: true": EVERY_GPU,
    "precision_fp8: tensorwise": (HOPPER,),  # cuBLAS multiplies 8 bits in other kernels on each generation
    "precision_fp8: rowwise": (HOPPER,),
    "precision_fp8: te": (HOPPER,),
}


def capability_of(device: torch.device) -> Capability | None:
    """The compute capability of a GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def not_run_on(setting: str, capability: Capability | None) -> str | None:
    """The reason why `auto` does not take a kernel on a GPU; None if the kernel has run there.

    setting: `key: value`, which the reason names. capability: of the GPU; None for a CPU, where nothing is
    refused.
    """
    capabilities = RUN_ON.get(setting)
    if capability is None or capabilities == EVERY_GPU or capability in (capabilities or ()):
        return None
    versions = " and ".join(".".join(map(str, version)) for version in capabilities or ())
    return f"it has run on {f'compute capability {versions} alone' if versions else 'no GPU'}; set {setting} to use it"
