"""Optimizers that clip and skip inside of their update, by the tensors `grad_scale` and `found_inf`."""

from collections.abc import Iterable

import torch
from torch import nn

from megatron.mpu import ParamSpec
from megatron.neox_arguments import NeoXArgs
from megatron.training.optimizers import Lion, weight_decay_groups


def build_optimizer(params: Iterable[tuple[nn.Parameter, ParamSpec]], args: NeoXArgs) -> torch.optim.Optimizer:
    """AdamW (NeoX's `Adam` decays weights the same way), SGD or Lion over `weight_decay_groups`."""
    groups = [group for group in weight_decay_groups(params, args) if group["params"]]
    options = args.optimizer["params"]
    if args.optimizer_name == "sgd":
        sgd = torch.optim.SGD(groups, lr=args.lr, momentum=options["momentum"], fused=True)
        if options["momentum"] != 0.0:
            for group in groups:
                for param in group["params"]:
                    # torch would make it in the first step, and leave it without values if that is skipped.
                    sgd.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return sgd
    if args.optimizer_name == "lion":
        return Lion(groups, lr=args.lr, betas=options["betas"])
    return torch.optim.AdamW(groups, lr=args.lr, betas=options["betas"], eps=options["eps"], fused=True)
