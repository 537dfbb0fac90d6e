"""Parameter groups, optimizers and the gradient norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model import Stage, layer_params
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs


def parameter_groups(stage: Stage, args: NeoXArgs) -> list[dict[str, Any]]:
    """NeoX's two groups: with weight decay, and without it for norms and biases; in registration order."""
    specs = {(layer, spec.name): spec for layer, found in layer_params(args).items() for spec in found}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for layer, name, param in stage_parameters(stage):
        (decayed if specs[layer, name].weight_decay else plain).append(param)
    groups = [
        {"name": "weight_decay_params", "params": decayed, "weight_decay": args.weight_decay},
        {"name": "no_weight_decay_params", "params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def assert_same_groups(groups_of_stage: list[dict[str, Any]], groups: ParallelGroups) -> None:
    """All pipeline stages own the same parameter groups; otherwise DeepSpeed's norm waits for ever."""
    if groups.group("pipe") is None:
        return
    names = [group["name"] for group in groups_of_stage]
    everyone: list[list[str] | None] = [None] * groups.size("pipe")
    dist.all_gather_object(everyone, names, group=groups.group("pipe"))
    if any(other != names for other in everyone):
        raise RuntimeError(f"pipeline stages own different parameter groups: {everyone}")


def build_optimizer(stage: Stage, args: NeoXArgs) -> torch.optim.Optimizer:
    """AdamW (NeoX's `Adam` decays weights the same way) or SGD, from torch: nothing is compiled."""
    groups = parameter_groups(stage, args)
    params = dict(args.optimizer["params"])
    params.pop("weight_decay", None)
    if args.optimizer_name == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=params.get("momentum", 0.0))
    betas = tuple(params.get("betas", (0.9, 0.999)))
    return torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=params.get("eps", 1e-8), fused=True)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def gradient_norm(params: Iterable[nn.Parameter], groups: ParallelGroups) -> Tensor:
    """2-norm of the whole model's gradient for one pipeline stage: fp32 scalar, the same on every rank.

    Parameters cut over tensor ranks are summed over them; replicated ones count once.
    """
    sharded = torch.zeros((), device=groups.device)
    replicated = torch.zeros((), device=groups.device)
    for param in params:
        if param.grad is None:
            continue
        square = param.grad.float().square().sum()
        if getattr(param, "tensor_model_parallel", False):
            sharded += square
        else:
            replicated += square
    if groups.group("tensor") is not None:
        dist.all_reduce(sharded, group=groups.group("tensor"))
    return (sharded + replicated).sqrt()


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`; no host sync."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(scale.to(param.grad.dtype))
