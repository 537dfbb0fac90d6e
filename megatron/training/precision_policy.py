"""Chooses the FP8 recipe of a run; for `precision_fp8: auto`, from a table of GPUs.

For `auto`, `precision_trial.py` then measures whether that recipe is faster than bf16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.neox_arguments import NeoXArgs

Recipe = Literal["tensorwise", "rowwise", "mxfp8", "te"]
CompileMode = Literal["block", "block-max"]


@dataclass(frozen=True)
class GPUPolicy:
    """The choices of `precision_fp8: auto` and `compile: auto` on GPUs of at least this CUDA compute
    capability.

    fp8: the recipe that `auto` tries; None if the GPU has no FP8. compile: how blocks are compiled in bf16.
    `not_run_on` may still exclude a choice that we have not run on such a GPU.
    """

    name: str
    capability: tuple[int, int]
    fp8: Recipe | None
    compile: CompileMode


# Newest first. Blocks in FP8 are compiled as `block`: cuBLAS computes their products, so there is nothing to
# tune.
POLICY = (
    GPUPolicy("Blackwell", (10, 0), "tensorwise", "block-max"),
    GPUPolicy("Hopper", (9, 0), "tensorwise", "block-max"),
    GPUPolicy("Ada", (8, 9), "tensorwise", "block"),
    GPUPolicy("Ampere", (8, 0), None, "block"),
    GPUPolicy("older GPUs", (0, 0), None, "block"),
)
_MIN_CAPABILITY: dict[str, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (8, 9), "te": (8, 9), "mxfp8": (10, 0)}


@dataclass(frozen=True)
class PrecisionChoice:
    """The FP8 recipe of a run, and the reason as a line for the log.

    recipe: None: no FP8, all products are in the dtype of `precision`. reason: None if the user set
    `precision_fp8: off`.
    """

    recipe: Recipe | None
    reason: str | None


def gpu_policy(capability: tuple[int, int]) -> GPUPolicy:
    """Returns the first row of `POLICY` whose minimum capability is not above this CUDA compute
    capability."""
    return next(row for row in POLICY if capability >= row.capability)


def choose_precision(args: NeoXArgs, device: torch.device) -> PrecisionChoice:
    """Returns the FP8 recipe of `precision_fp8` on this device; for `auto`, the recipe to try.

    Raises ConfigError for a recipe that the GPU cannot run. A CPU emulates every recipe that you name, so
    that its rounding can be seen.
    """
    requested = args.precision_fp8
    if requested == "off":
        return PrecisionChoice(None, None)
    capability = capability_of(device)
    if requested == "auto":
        return _auto(args, capability)
    key = "precision_fp8" if args.user_values.get("precision_fp8") is not None else "te_fp8_mha"
    source = f"({args.origin(key)})" if key == "precision_fp8" else f"by te_fp8_mha ({args.origin(key)})"
    if capability is None:
        emulated = "emulated on a CPU to show its rounding, slower than bf16"
        return PrecisionChoice(requested, f"precision_fp8: {requested} {source}, {emulated}")
    if capability < _MIN_CAPABILITY[requested]:
        required = ".".join(map(str, _MIN_CAPABILITY[requested]))
        actual = f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
        alternatives = "tensorwise, or off" if capability >= _MIN_CAPABILITY["tensorwise"] else "off, or --no-fp8"
        raise args.error(
            key, f"{requested} needs compute capability {required}, but {actual}; write precision_fp8: {alternatives}"
        )
    return PrecisionChoice(requested, f"precision_fp8: {requested} {source}")


def _auto(args: NeoXArgs, capability: tuple[int, int] | None) -> PrecisionChoice:
    def off(reason: str) -> PrecisionChoice:
        return PrecisionChoice(None, f"precision_fp8: auto chose off: {reason}")

    if capability is None:
        return off("CPUs only emulate FP8")
    if args.params_dtype != "bf16":
        return off(f"FP8 needs bf16 weights, but these are {args.params_dtype}")
    if args.quantized:
        return off("the base weights are in 4 bits (lora.quantization)")
    if not args.fp8_blocks:
        return off("first_last_layers_bf16 leaves no block for FP8")
    row = gpu_policy(capability)
    if row.fp8 is None:
        return off(f"there is no FP8 on {row.name}")
    unproven = not_run_on(f"precision_fp8: {row.fp8}", capability)
    if unproven is not None:
        return off(f"{row.fp8} on {row.name}: {unproven}")
    if args.deterministic_mode:
        return off(f"auto would time FP8, which deterministic_mode forbids; set precision_fp8: {row.fp8} to use it")
    return PrecisionChoice(row.fp8, f"precision_fp8: auto chose {row.fp8} for {row.name}")


def recorded_precision(args: NeoXArgs, recorded: str | None, log: Callable[[str], None]) -> NeoXArgs:
    """Returns the configuration with `precision_fp8: auto` replaced by the value that a resumed run has used
    so far.

    recorded: `precision_fp8` in the run's checkpoint, a recipe or off; None if the checkpoint has no such
    key.
    """
    if args.precision_fp8 != "auto" or recorded in (None, "auto"):
        return args
    log(f"precision_fp8: auto keeps {recorded}, the value of the resumed run; set a recipe or off to change it")
    return args.settle("precision_fp8", recorded)
