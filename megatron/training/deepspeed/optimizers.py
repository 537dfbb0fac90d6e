"""Builds optimizers for DeepSpeed, with the same parameter groups on every pipeline stage.

It also builds DeepSpeedCPUAdam, for optimizer state that is kept on the CPU.
"""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from megatron.distributed import run_on_all_ranks_of, run_on_each_rank
from megatron.model import Stage, named_params, trained_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.offload import offloads_optimizer
from megatron.training.optimizers import build_optimizer, parameter_groups


def build_sharded_optimizer(stage: Stage, args: NeoXArgs, groups: ParallelGroups) -> torch.optim.Optimizer:
    """Returns the optimizer of `build_optimizer`, or DeepSpeedCPUAdam, over a stage's trained parameters.

    DeepSpeed refuses an empty parameter group. If this pipeline stage has no parameters for a group that
    other stages have, its group gets a placeholder: one zero without gradient.
    Raises ConfigError as `build_optimizer` does, if DeepSpeedCPUAdam cannot be compiled, or if an optimizer
    that runs on the CPU gets weights on a GPU.
    """
    param_groups = parameter_groups(stage, args)
    specs = named_params(args)
    decays = {specs[name].weight_decay for name in trained_parameters(args)}
    for group, decayed in zip(param_groups, (True, False), strict=True):
        if not group["params"] and decayed in decays:
            group["params"].append(nn.Parameter(torch.zeros(1, device=groups.device)))
    param_groups = [group for group in param_groups if group["params"]]
    _assert_same_groups(param_groups, groups)
    if args.optimizer_name in ("cpu_adam", "cpu_torch_adam"):
        _check_on_cpu(param_groups, args)
    build = _cpu_adam if on_cpu_adam(args) and not args.use_bnb_optimizer else build_optimizer
    return run_on_each_rank(groups, lambda: build(param_groups, args))


def _assert_same_groups(groups_of_stage: list[dict[str, Any]], groups: ParallelGroups) -> None:
    """Raise RuntimeError if pipeline stages have different parameter groups, with which DeepSpeed's norm
    hangs."""
    names = [group["name"] for group in groups_of_stage]
    everyone = run_on_all_ranks_of(groups.group("pipe"), groups.size("pipe"), lambda: names)
    if any(stage_names != names for stage_names in everyone):
        raise RuntimeError(f"pipeline stages own different parameter groups: {everyone}; report this as a bug")


def on_cpu_adam(args: NeoXArgs) -> bool:
    """Returns whether DeepSpeedCPUAdam makes the updates: for `CPU_Adam`, and for Adam with offloaded
    state."""
    is_adam = args.optimizer_name in ("adam", "adamw")
    return args.optimizer_name == "cpu_adam" or (is_adam and offloads_optimizer(args))


def _cpu_adam(groups: list[dict[str, Any]], args: NeoXArgs) -> torch.optim.Optimizer:
    """Returns DeepSpeedCPUAdam, which is compiled at its first use."""
    params = args.optimizer["params"]
    try:
        return DeepSpeedCPUAdam(groups, lr=args.lr, betas=params["betas"], eps=params["eps"])
    except RuntimeError as problem:
        reason = " ".join(str(problem.__cause__ or problem).split())
        text = f"{args.optimizer['type']} on the CPU must be compiled, which failed ({reason}); install g++ and ninja"
        raise args.error("optimizer.type", f"{text}, or write CPU_Torch_Adam") from problem


def _check_on_cpu(groups: list[dict[str, Any]], args: NeoXArgs) -> None:
    on_gpu = any(param.device.type != "cpu" for group in groups for param in group["params"])
    if on_gpu and not offloads_optimizer(args):
        fix = "write AdamW, or set zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}"
        raise args.error("optimizer.type", f"{args.optimizer['type']} runs on the CPU, but weights are on a GPU; {fix}")


def fitting_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns a `state_dict` for this optimizer with the saved moments and the optimizer's own options.

    Options are those of its parameter groups, such as weight decay and betas.
    """
    state = {
        i: {key: fitting_step(value, optimizer) if key == "step" else value for key, value in param_state.items()}
        for i, param_state in saved["state"].items()
    }
    groups = [
        {**{key: value for key, value in now.items() if key != "params"}, "params": saved_group["params"]}
        for now, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": groups}


def fitting_step(step: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Returns a step count in the type that the optimizer needs: int for DeepSpeedCPUAdam, else unchanged."""
    return int(step) if hasattr(optimizer, "ds_opt_adam") else step
