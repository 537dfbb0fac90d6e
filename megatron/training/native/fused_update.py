"""Implements AdamW in one pass over memory.

It reads gradients in their own dtype, updates fp32 master weights and fp32 or bf16 moments, and writes 16-bit
weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.training.native.stochastic_rounding import Stream, noise, rounded, step_keys


class FusedAdamW(torch.optim.Optimizer):
    """AdamW over fp32 master weights that reads gradients in their own dtype and writes 16-bit weights.

    weights: the 16-bit weight of each master weight, with the same memory layout; {}: none is written.
    streams: random streams, by master weight, for bf16 moments with stochastic rounding; None: fp32 moments.
    gradients: an attribute to set before each step, by master weight; the step removes them. A missing or
        None gradient counts as zeros.

    As in torch's fused AdamW, `grad_scale` divides gradients, and `found_inf` leaves weights and state
    unchanged.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        groups: Any,
        weights: Mapping[nn.Parameter, nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        streams: Mapping[nn.Parameter, Stream] | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._weights, self.gradients = weights, dict[Tensor, Tensor | None]()
        if not all(value.is_contiguous() for pair in weights.items() for value in pair):
            raise ValueError("FusedAdamW needs parameters that are contiguous")
        device = self.param_groups[0]["params"][0].device
        self._unit_scale, self._zero_skip = torch.ones((), device=device), torch.zeros((), device=device)
        self._moments = torch.float32 if streams is None else torch.bfloat16
        self._parts: list[tuple[list[nn.Parameter], Tensor, list[int]]] = []
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.numel()]
            own_streams = [] if streams is None else [streams[master] for master in masters]
            # Copied to the device once, so that steps need no copy.
            numbers = torch.tensor([stream.number for stream in own_streams], dtype=torch.int64, device=device)
            self._parts.append((masters, numbers, [stream.start for stream in own_streams]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter with its entry in `gradients`."""
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group, (masters, streams, firsts) in zip(self.param_groups, self._parts, strict=True):
            if not masters:
                continue
            for master in masters:
                if not self.state[master]:
                    zeros = {key: torch.zeros_like(master, dtype=self._moments) for key in ("exp_avg", "exp_avg_sq")}
                    self.state[master] = {"step": torch.zeros((), device=master.device), **zeros}
            weights = [self._weights[master] for master in masters] if self._weights else []
            states = [self.state[master] for master in masters]
            popped = [self.gradients.pop(master, None) for master in masters]
            gradients = [
                torch.zeros_like(master) if gradient is None else gradient.contiguous()
                for gradient, master in zip(popped, masters, strict=True)
            ]
            adamw(
                masters, gradients, *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
                weights, self._unit_scale if scale is None else scale, self._zero_skip if skip is None else skip,
                streams, firsts, group["lr"], *group["betas"], group["eps"], group["weight_decay"],
            )  # fmt: skip


@torch.library.custom_op("megatron::adamw", mutates_args=("masters", "exp_avgs", "exp_avg_sqs", "steps", "out"))
def adamw(
    masters: list[Tensor], gradients: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    steps: list[Tensor], out: list[Tensor], grad_scale: Tensor, found_inf: Tensor, streams: Tensor, firsts: list[int],
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Take a step of AdamW in place. Arguments that are not listed here are those of `torch._fused_adamw_`.

    masters: the fp32 master weights.
    out: the 16-bit weights, which get the new values of `masters`; []: none are written.
    streams, firsts: for bf16 moments, `number` and `start` of each parameter's `Stream`; empty: moments are
        fp32.
    """
    torch._foreach_add_(steps, 1.0)
    counts = torch.stack(steps)
    keys = step_keys(streams, counts.long()).unbind() if firsts else ()
    if masters[0].device.type != "cuda":
        for i, master in enumerate(masters):  # one at a time: offloaded ones fill the memory, and this makes copies
            gradient = gradients[i].to(torch.float32, copy=True)
            average, square = exp_avgs[i].float(), exp_avg_sqs[i].float()
            torch._fused_adamw_(
                [master], [gradient], [average], [square], [], [steps[i]], lr=lr, beta1=beta1, beta2=beta2, eps=eps,
                weight_decay=weight_decay, amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf,
            )  # fmt: skip
            if out:
                out[i].copy_(master)
            if firsts:
                bits = noise(keys[i], firsts[i], master.numel()).view(master.shape)
                exp_avgs[i].copy_(rounded(average, bits & 0xFFFF))
                exp_avg_sqs[i].copy_(rounded(square, bits >> 16))
    else:
        from megatron.training.native.adamw_kernel import update

        counts = counts.double()
        corrections = torch.stack([1 - beta1**counts, (1 - beta2**counts).sqrt()], dim=1).float().unbind()
        for i, master in enumerate(masters):
            update(
                master, gradients[i], exp_avgs[i], exp_avg_sqs[i], out[i] if out else None, corrections[i],
                grad_scale, found_inf, keys[i] if firsts else None, firsts[i] if firsts else 0,
                lr, weight_decay, beta1, beta2, eps,
            )  # fmt: skip
    torch._foreach_sub_(steps, [found_inf] * len(steps))


@adamw.register_fake
def _(*operands: Any) -> None:
    """The fake implementation of `megatron::adamw` for torch.compile: it returns nothing."""
