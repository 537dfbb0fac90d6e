"""By which recipe a run multiplies in FP8, if it does: what each kind of GPU is asked to do, as data."""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron.neox_arguments import NeoXArgs

Recipe = Literal["tensorwise", "rowwise", "mxfp8", "te"]
CompileMode = Literal["block", "block-max"]


@dataclass(frozen=True)
class GPUPolicy:
    """What `auto` chooses on GPUs from this CUDA compute capability on.

    fp8: the recipe where FP8 is asked for by `precision_fp8: auto`; None where the GPU has none. compile: how
    blocks are compiled in bf16. why: of the recipe, for the log.
    """

    name: str
    capability: tuple[int, int]
    fp8: Recipe | None
    compile: CompileMode
    why: str


_TENSORWISE = "1.315 x bf16 for tensorwise, 1.15 x for rowwise, measured on one H200 with torchao"
# Newest first. With FP8 blocks are compiled as `block`: products are cuBLAS's, for which there is nothing to
# tune.
POLICY = (
    GPUPolicy("Blackwell", (10, 0), "tensorwise", "block-max", f"{_TENSORWISE}; mxfp8 is not measured"),
    GPUPolicy("Hopper", (9, 0), "tensorwise", "block-max", _TENSORWISE),
    GPUPolicy("Ada", (8, 9), "tensorwise", "block", "not measured"),
    GPUPolicy("Ampere", (8, 0), None, "block", "it has no FP8"),
    GPUPolicy("older GPUs", (0, 0), None, "block", "they have no FP8"),
)
_LEAST: dict[str, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (8, 9), "te": (8, 9), "mxfp8": (10, 0)}


@dataclass(frozen=True)
class PrecisionChoice:
    """recipe: of FP8, None for bf16 alone (or what `precision` says); reason: a line for the log, None where
    nothing was asked for."""

    recipe: Recipe | None
    reason: str | None


def gpu_policy(capability: tuple[int, int]) -> GPUPolicy:
    """The first row of `POLICY` that this CUDA compute capability reaches."""
    return next(row for row in POLICY if capability >= row.capability)


def choose_precision(args: NeoXArgs, device: torch.device) -> PrecisionChoice:
    """What `precision_fp8` means on this device.

    Raises ConfigError for a recipe that the GPU does not have. A CPU takes every recipe that is named, to see
    its numbers.
    """
    asked = args.precision_fp8
    if asked == "off":
        return PrecisionChoice(None, None)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if asked == "auto":
        return _auto(args, capability)
    key = "precision_fp8" if args.user_values.get("precision_fp8") is not None else "te_fp8_mha"
    by = f"({args.origin(key)})" if key == "precision_fp8" else f"by te_fp8_mha ({args.origin(key)})"
    if capability is None:
        emulated = "computed on a CPU to see its numbers, slower than bf16"
        return PrecisionChoice(asked, f"precision_fp8: {asked} {by}, {emulated}")
    if capability < _LEAST[asked]:
        wanted = ".".join(map(str, _LEAST[asked]))
        have = f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
        instead = "tensorwise, or off" if capability >= _LEAST["tensorwise"] else "off, or --no-fp8"
        raise args.error(key, f"{asked} needs compute capability {wanted}, {have}; write precision_fp8: {instead}")
    return PrecisionChoice(asked, f"precision_fp8: {asked} {by}")


def _auto(args: NeoXArgs, capability: tuple[int, int] | None) -> PrecisionChoice:
    def off(why: str) -> PrecisionChoice:
        return PrecisionChoice(None, f"precision_fp8: auto chose off: {why}")

    if capability is None:
        return off("on CPUs")
    if args.params_dtype != "bf16":
        return off(f"FP8 needs bf16 weights, these are {args.params_dtype}")
    if args.quantized:
        return off("weights below adapters are in 4 bits (lora.quantization)")
    if not args.fp8_blocks:
        return off("first_last_layers_bf16 leaves no block for it")
    row = gpu_policy(capability)
    if row.fp8 is None:
        return off(f"{row.name}: {row.why}")
    return PrecisionChoice(row.fp8, f"precision_fp8: auto chose {row.fp8} for {row.name}: {row.why}")
