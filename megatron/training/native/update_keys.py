"""Keys that say how the native engine's update is run: what `auto` stands for, and what a run lacks for
`true`."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from megatron.mpu import DTYPES, ParallelGroups
from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.neox_arguments import NeoXArgs
from megatron.training.apex import uses_apex
from megatron.training.compile_blocks import has_compiler


def resolve_update_keys(
    args: NeoXArgs, groups: ParallelGroups, engine: str, log: Callable[[str], None] | None
) -> NeoXArgs:
    """The configuration with `auto` of each key replaced by the choice, which is printed. Raises ConfigError
    where `true` asks for what the run cannot have."""
    for key, problem_of in (("fused_update", _fused), ("overlap_optimizer_with_forward", _overlapped)):
        args = _resolved(args, key, problem_of(args, groups, engine), groups, engine, log)
    return args


def _resolved(
    args: NeoXArgs, key: str, problem: str | None, groups: ParallelGroups, engine: str,
    log: Callable[[str], None] | None,
) -> NeoXArgs:  # fmt: skip
    """problem: what the run lacks for the key, in words that go on after "needs"."""
    value = getattr(args, key)
    if value is False or (value == "auto" and engine != "native"):
        return args.settle(key, False)
    if value is True:
        if problem is not None:
            raise args.error(key, f"true needs {problem}; write auto or false")
        return args
    reason = not_run_on(f"{key}: true", capability_of(groups.device)) if problem is None else f"it needs {problem}"
    if reason is None and groups.device.type != "cuda":
        reason = "it needs a GPU to be faster"
    if log is not None:
        log(f"{key}: {str(reason is None).lower()} (auto{'' if reason is None else f': {reason}'})")
    return args.settle(key, reason is None)


def _fused(args: NeoXArgs, groups: ParallelGroups, engine: str) -> str | None:
    if engine != "native":
        return "engine: native"
    if args.optimizer_name not in ("adam", "adamw") or args.use_bnb_optimizer or uses_apex(args, groups.device):
        return "torch's AdamW"
    if DTYPES[args.params_dtype] == torch.float32:
        return "16-bit weights"
    if groups.size("data") > 1:
        return "one data rank, as gradients are summed over data ranks in fp32"
    if args.gradient_accumulation_steps != 1 or args.gd_mode:  # which has micro-batches of two sets
        return "one micro-batch a step, as gradients of several are added in fp32"
    if groups.device.type == "cuda" and (find_spec("triton") is None or not has_compiler(groups.device)):
        return "Triton and a C compiler"
    return None


def _overlapped(args: NeoXArgs, groups: ParallelGroups, engine: str) -> str | None:
    return None if engine == "native" else "engine: native"
