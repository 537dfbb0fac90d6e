"""Which kernels have run on which GPUs, compared there with plain computations (`tests/gpu`). An `auto` takes
no other; the tables of these runs are in benchmarks/results."""

from collections.abc import Mapping

import torch

Capability = tuple[int, int]
"""CUDA compute capability, (major, minor)."""

HOPPER: Capability = (9, 0)
EVERY_GPU: tuple[Capability, ...] = ()
"""Of kernels that ran on Hopper and are built from one source for every GPU, by torch or by Triton."""

# By the setting that asks for the kernel whatever has run. What is not here has run on no GPU: attention by
# flash3, flash4, flash_attn and transformer_engine, precision_fp8: mxfp8, async_tensor_parallel: true,
# te_backend: transformer_engine, apex: true, mamba_backend: mamba_ssm and fla,
# overlap_optimizer_with_forward: true, which is no kernel but an order of kernels on two streams.
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
    """Why `auto` does not take the kernel of a setting (`key: value`) on a GPU of this compute capability, in
    words with the setting; None where it has run there, and on a CPU (capability None)."""
    capabilities = RUN_ON.get(setting)
    if capability is None or capabilities == EVERY_GPU or capability in (capabilities or ()):
        return None
    where = " and ".join(".".join(map(str, each)) for each in capabilities or ())
    return f"it has run on {f'compute capability {where} alone' if where else 'no GPU'}; set {setting} to use it"
