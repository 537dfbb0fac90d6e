"""Resolves `fused_update` and `overlap_optimizer_with_forward`, by which the native engine updates weights.

It makes the choice of `auto`, and checks the requirements of `true`.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from megatron.mpu import DTYPES, ParallelGroups
from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of
from megatron.training.apex import uses_apex
from megatron.training.compile_blocks import has_compiler
from megatron.training.offload import offloads_optimizer

# Keys that `auto` resolves to false although `true` works on GPUs, and the reason.
LEFT_OFF = {
    "overlap_optimizer_with_forward": "steps of a 1.4B model were only 0.3 % faster on an H200; set true to use it"
}


def resolve_update_keys(args: NeoXArgs, groups: ParallelGroups, engine: str, log: Callable[[str], None]) -> NeoXArgs:
    """Returns the configuration with `fused_update` and `overlap_optimizer_with_forward` resolved to true or
    false.

    The choices of `auto` are logged. Raises ConfigError if the run does not meet the requirements of a key
    that is `true`, or of `optimizer_state_dtype: bf16`.
    """
    if args.optimizer_state_dtype == "bf16" and (problem := _moments(args, groups, engine)) is not None:
        raise args.error("optimizer_state_dtype", f"bf16 needs {problem}; write fp32")
    args = _resolved(args, "fused_update", _fused(args, groups, engine), groups, engine, log)
    problem = _off_device(args) if engine == "native" else "engine: native"
    return _resolved(args, "overlap_optimizer_with_forward", problem, groups, engine, log)


def _resolved(
    args: NeoXArgs, key: str, problem: str | None, groups: ParallelGroups, engine: str,
    log: Callable[[str], None],
) -> NeoXArgs:  # fmt: skip
    """Returns the configuration with `key` resolved to true or false.

    problem: a requirement of `true` that the run does not meet, worded to follow "needs"; None: it meets all.
    """
    value = getattr(args, key)
    if value is False or (value == "auto" and engine != "native"):
        return args.settle(key, False)
    if value is True:
        if problem is not None:
            raise args.error(key, f"true needs {problem}; write auto or false")
        return args
    if problem is not None:
        reason: str | None = f"it needs {problem}"
    elif groups.device.type != "cuda":
        reason = "it needs a GPU to be faster"
    else:
        reason = LEFT_OFF.get(key) or not_run_on(f"{key}: true", capability_of(groups.device))
    log(f"{key}: {str(reason is None).lower()} (auto{'' if reason is None else f': {reason}'})")
    return args.settle(key, reason is None)


def _fused(args: NeoXArgs, groups: ParallelGroups, engine: str) -> str | None:
    if (problem := _moments(args, groups, engine) or _off_device(args)) is not None:
        return problem
    if DTYPES[args.params_dtype] == torch.float32:
        return "16-bit weights"
    if args.params_dtype == "fp16":
        return "bf16, as fp16's gradients are scaled"
    if groups.size("pipe") > 1:
        return "pipe_parallel_size 1, as stages sum the gradients of their copies of a weight in fp32"
    if groups.size("data_context") > 1:
        return "one data rank, as gradients are summed over data ranks in fp32"
    if args.on_out_of_memory == "split":
        return "on_out_of_memory: stop, as a step that is split has several micro-batches"
    if args.gradient_accumulation_steps != 1 or declaration_of(args).sets_per_step(args) > 1:
        return "one micro-batch a step, as gradients of several are added in fp32"
    return None


def _off_device(args: NeoXArgs) -> str | None:
    return "optimizer states on the device (no offload_optimizer)" if offloads_optimizer(args) else None


def _moments(args: NeoXArgs, groups: ParallelGroups, engine: str) -> str | None:
    """Returns the first requirement of our fused AdamW that the run does not meet, worded to follow "needs".

    None if the run meets all of them.
    """
    if engine != "native":
        return "engine: native"
    with_apex = not offloads_optimizer(args) and uses_apex(args, groups.device)
    if args.optimizer_name not in ("adam", "adamw") or args.use_bnb_optimizer or with_apex:
        return "Adam or AdamW without apex or 8 bits"
    on_gpu = groups.device.type == "cuda" and not offloads_optimizer(args)
    if on_gpu and (find_spec("triton") is None or not has_compiler(groups.device)):
        return "Triton and a C compiler"
    return None
