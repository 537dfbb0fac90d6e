"""Parameter groups, optimizers and the gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model import Stage, layer_params, trained_parameters
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.deepspeed.config import offload


def parameter_groups(stage: Stage, args: NeoXArgs) -> list[dict[str, Any]]:
    """NeoX's two groups: with weight decay, and without it for norms and biases; in registration order.

    Of trained parameters alone. Where a pipeline stage has none of a group that others have, one zero without gradient
    stands for them: DeepSpeed refuses an empty group.
    """
    specs = {(layer, spec.name): spec for layer, found in layer_params(args).items() for spec in found}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for layer, name, param in stage_parameters(stage):
        if not param.requires_grad:
            continue
        (decayed if specs[layer, name].weight_decay else plain).append(param)
    for group, decays in ((decayed, True), (plain, False)):
        if not group and any(specs[found].weight_decay == decays for found in trained_parameters(args)):
            group.append(nn.Parameter(torch.zeros(1, device=stage.device_of_groups)))
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


def on_cpu_adam(args: NeoXArgs) -> bool:
    """Whether DeepSpeedCPUAdam makes the updates: asked for, or Adam whose state is kept on the CPU."""
    offloaded = offload(args, "offload_optimizer") is not None
    return args.optimizer_name == "cpu_adam" or (args.optimizer_name in ("adam", "adamw") and offloaded)


def build_optimizer(
    stage: Stage, args: NeoXArgs, cpu_adam: Callable[..., torch.optim.Optimizer] | None = None
) -> torch.optim.Optimizer:
    """AdamW (NeoX's `Adam` decays weights the same way), SGD or Lion. cpu_adam: DeepSpeedCPUAdam, which is compiled at
    its first use; nothing else is.

    Raises ConfigError when `use_bnb_optimizer` finds no bitsandbytes, or is set beside another optimizer; when there is
    no compiler for CPU_Adam; when an optimizer of the CPU meets weights on a GPU.
    """
    groups = parameter_groups(stage, args)
    params = args.optimizer["params"]
    if args.optimizer_name in ("cpu_adam", "cpu_torch_adam"):
        _check_on_cpu(groups, args)
    if args.use_bnb_optimizer:
        return _adam_8bit(groups, args)
    if args.optimizer_name == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=params["momentum"])
    if args.optimizer_name == "lion":
        return Lion(groups, lr=args.lr, betas=params["betas"])
    adam = {"lr": args.lr, "betas": params["betas"], "eps": params["eps"]}
    if not on_cpu_adam(args):
        return torch.optim.AdamW(groups, **adam, fused=True)
    assert cpu_adam is not None
    try:
        return cpu_adam(groups, **adam)
    except RuntimeError as problem:
        reason = " ".join(str(problem.__cause__ or problem).split())
        text = f"{args.optimizer['type']} on the CPU is compiled at its first use, and was not ({reason}); install g++ "
        place = args.origin("optimizer.type")
        raise ConfigError([f"{place}: optimizer.type: {text}and ninja, or write CPU_Torch_Adam"]) from problem


def _check_on_cpu(groups: list[dict[str, Any]], args: NeoXArgs) -> None:
    on_gpu = any(param.device.type != "cpu" for group in groups for param in group["params"])
    if on_gpu and offload(args, "offload_optimizer") is None:
        fix = "write AdamW, or set zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}"
        place = args.origin("optimizer.type")
        raise ConfigError([f"{place}: optimizer.type: {args.optimizer['type']} updates on the CPU; {fix}"])


def fitting_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A saved `state_dict` for this optimizer: its moments; weight decay, betas and the like as configured now."""
    state = {
        i: {key: fitting_step(value, optimizer) if key == "step" else value for key, value in found.items()}
        for i, found in saved["state"].items()
    }
    groups = [
        {**{key: value for key, value in now.items() if key != "params"}, "params": then["params"]}
        for now, then in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": groups}


def fitting_step(step: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Updates done as this optimizer counts them: DeepSpeedCPUAdam in int; torch's makes its tensors itself."""
    return int(step) if hasattr(optimizer, "ds_opt_adam") else step


def _adam_8bit(groups: list[dict[str, Any]], args: NeoXArgs) -> torch.optim.Optimizer:
    place = args.origin("use_bnb_optimizer")
    if args.optimizer_name not in ("adam", "adamw"):
        raise ConfigError([f"{place}: use_bnb_optimizer: is for Adam and AdamW, not {args.optimizer['type']}"])
    try:
        import bitsandbytes
    except ImportError as problem:
        raise ConfigError([f"{place}: use_bnb_optimizer needs bitsandbytes: pip install 'neox[bnb]'"]) from problem
    params = args.optimizer["params"]
    return bitsandbytes.optim.AdamW8bit(groups, lr=args.lr, betas=params["betas"], eps=params["eps"])


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum as update, decoupled weight decay (arXiv 2302.06675, algorithm 2)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            grads = [param.grad for param in params]
            momenta = [self.state[p].setdefault("exp_avg", torch.zeros_like(p)) for p in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(params, torch._foreach_sign(torch._foreach_lerp(grads, momenta, beta1)), alpha=-lr)
            torch._foreach_lerp_(momenta, grads, 1.0 - beta2)


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
