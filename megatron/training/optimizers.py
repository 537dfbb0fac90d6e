"""Builds parameter groups and optimizers, computes and clips gradient norms, and skips updates."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model import Stage
from megatron.model.init import parameters_with_specs
from megatron.mpu import ParallelGroups, ParamSpec
from megatron.neox_arguments import ConfigError, NeoXArgs


def parameter_groups(stage: Stage, args: NeoXArgs) -> list[dict[str, Any]]:
    """Returns the `weight_decay_groups` of a stage's trained parameters, which stay in registration order."""
    items = parameters_with_specs(stage, args)
    return weight_decay_groups([(param, spec) for _, _, param, spec in items if param.requires_grad], args)


def weight_decay_groups(params: Iterable[tuple[nn.Parameter, ParamSpec]], args: NeoXArgs) -> list[dict[str, Any]]:
    """Returns two parameter groups: those with weight decay, and those without it.

    As in GPT-NeoX, norms and biases have none; nor have attention sinks and Mamba's A_log, D and dt_bias. A
    group may be empty.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for param, spec in params:
        (decayed if spec.weight_decay else undecayed).append(param)
    return [
        {"name": "weight_decay_params", "params": decayed, "weight_decay": args.weight_decay},
        {"name": "no_weight_decay_params", "params": undecayed, "weight_decay": 0.0},
    ]


def build_optimizer(groups: list[dict[str, Any]], args: NeoXArgs) -> torch.optim.Optimizer:
    """Returns AdamW (also for `Adam`, as in GPT-NeoX), SGD or Lion over the parameter groups that are not
    empty.

    Raises ConfigError if `use_bnb_optimizer` is set but bitsandbytes is not installed, or the optimizer is
    neither Adam nor AdamW.
    """
    groups, params = [group for group in groups if group["params"]], args.optimizer["params"]
    if args.use_bnb_optimizer:
        return _adam_8bit(groups, args)
    if args.optimizer_name == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=params["momentum"])
    if args.optimizer_name == "lion":
        return Lion(groups, lr=args.lr, betas=params["betas"])
    return torch.optim.AdamW(groups, lr=args.lr, betas=params["betas"], eps=params["eps"], fused=True)


def _adam_8bit(groups: list[dict[str, Any]], args: NeoXArgs) -> torch.optim.Optimizer:
    if args.optimizer_name not in ("adam", "adamw"):
        raise args.error(
            "use_bnb_optimizer", f"works with Adam and AdamW only, not with {args.optimizer['type']}; remove it"
        )
    try:
        import bitsandbytes
    except ImportError as problem:
        place = args.origin("use_bnb_optimizer")
        raise ConfigError([f"{place}: use_bnb_optimizer needs bitsandbytes: pip install 'neox[bnb]'"]) from problem
    params = args.optimizer["params"]
    return bitsandbytes.optim.AdamW8bit(groups, lr=args.lr, betas=params["betas"], eps=params["eps"])


class Lion(torch.optim.Optimizer):
    """The Lion optimizer (arXiv 2302.06675, algorithm 2), with decoupled weight decay.

    It updates weights by the sign of an interpolation of momentum and gradient. As in torch's fused
    optimizers, `grad_scale` divides gradients, and `found_inf` leaves weights and state unchanged.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for part in update_batches(params):
                self._update(group, part)

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        for param in params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        momenta = [self.state[param]["exp_avg"] for param in params]
        grads = scaled_gradients(self, [param.grad for param in params], momenta)
        lr, (beta1, beta2) = group["lr"] * update_factor(self), group["betas"]
        updates = torch._foreach_sign(torch._foreach_lerp(grads, momenta, beta1))
        torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        torch._foreach_mul_(updates, -lr)
        torch._foreach_add_(params, updates)
        torch._foreach_lerp_(momenta, grads, 1.0 - beta2)


def update_batches(params: list[Any]) -> list[list[Any]]:
    """Returns the lists of parameters whose updates run as one operation: on a GPU all of them. On a CPU each
    is alone, because offloaded ones fill the memory and an update makes copies."""
    if not params or params[0].device.type == "cuda":
        return [params] if params else []
    return [[param] for param in params]


def scaled_gradients(
    optimizer: torch.optim.Optimizer, grads: Sequence[Tensor], momenta: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradients divided by the optimizer's `grad_scale`.

    If its `found_inf` is 1, it returns the momenta instead, so that interpolating with them changes nothing.
    """
    scale, skip = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    scaled = list(grads) if scale is None else list(torch._foreach_div(list(grads), scale))
    if skip is None:
        return scaled
    return [torch.where(skip > 0, momentum, grad) for momentum, grad in zip(momenta, scaled, strict=True)]


def norm_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which to sum the squares of tensors on `device`.

    It is fp64 on CPUs, where torch's fp32 norm of a large tensor is too small: by 1 % at 1e8 elements.
    """
    return torch.float64 if device.type == "cpu" else torch.float32


def update_factor(optimizer: torch.optim.Optimizer) -> Tensor | float:
    """Returns the factor of a step's learning rate: 0 if the optimizer's `found_inf` is 1, else 1."""
    skip = getattr(optimizer, "found_inf", None)
    return 1.0 if skip is None else 1.0 - skip


def state_tensors(state: Mapping[Tensor, Mapping[str, Any]]) -> list[Tensor]:
    """Returns all tensors in the `state` of an optimizer, such as moments."""
    return [value for param_state in state.values() for value in param_state.values() if isinstance(value, Tensor)]


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of every group, multiplied by the group's `lr_ratio` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


@torch.no_grad()
def gradient_norm(
    sharded: Iterable[nn.Parameter], replicated: Iterable[nn.Parameter], groups: ParallelGroups
) -> Tensor:
    """Returns the 2-norm of the full gradient of one pipeline stage: an fp32 scalar, equal on every tensor
    rank.

    sharded: parameters of which each tensor rank holds a part; their squares are summed over tensor ranks.
    replicated: parameters that every tensor rank holds in full; they count once.
    """
    squares = torch.zeros(2, device=groups.device)
    for square, params in zip(squares, (sharded, replicated), strict=True):
        for param in params:
            if param.grad is not None:
                square += param.grad.float().square().sum()
    groups.sum(squares[0], "tensor")
    return squares.sum().sqrt()


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`. norm: their norm now. No host
    sync."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(scale.to(param.grad.dtype))


def leave_out(optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter], skip: Tensor) -> None:
    """Make the optimizer's next update change nothing if `skip` is true.

    If the optimizer cannot read `found_inf` on the device (unfused SGD, 8-bit Adam), the host waits for
    `skip` and drops the gradients of `params`.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    elif bool(skip):
        for param in params:
            param.grad = None
