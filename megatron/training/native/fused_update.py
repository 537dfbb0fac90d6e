"""AdamW in one pass over memory: 16-bit gradients as backward leaves them are read once, fp32 weights and
moments updated, 16-bit weights written."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class FusedAdamW(torch.optim.Optimizer):
    """AdamW over fp32 masters that reads a 16-bit gradient of each, and writes its 16-bit weight.

    weights: of each master, which lie in memory alike. gradients: to be set before a step, which takes them;
    one that is None or not there is of zeros. Clipping, skipping and state are those of torch's fused AdamW:
    `grad_scale` divides gradients, `found_inf` leaves everything as it is.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        groups: Any,
        weights: Mapping[nn.Parameter, nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._weights, self.gradients = weights, dict[Tensor, Tensor | None]()
        if not all(each.is_contiguous() for pair in weights.items() for each in pair):
            raise ValueError("FusedAdamW needs parameters that are contiguous")
        device = self.param_groups[0]["params"][0].device
        self._one, self._no = torch.ones((), device=device), torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter."""
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.numel()]
            if not masters:
                continue
            for master in masters:
                self._fill_state(master)
            weights, states = [self._weights[master] for master in masters], [self.state[m] for m in masters]
            given = [self.gradients.pop(master, None) for master in masters]
            gradients = [
                torch.zeros_like(weight) if gradient is None else gradient.contiguous()
                for gradient, weight in zip(given, weights, strict=True)
            ]
            adamw(
                masters, gradients, *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
                weights, self._one if scale is None else scale, self._no if skip is None else skip,
                group["lr"], *group["betas"], group["eps"], group["weight_decay"],
            )  # fmt: skip

    def _fill_state(self, master: Tensor) -> None:
        if not self.state[master]:
            zeros = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
            self.state[master] = {"step": torch.zeros((), device=master.device), **zeros}


@torch.library.custom_op("megatron::adamw", mutates_args=("masters", "exp_avgs", "exp_avg_sqs", "steps", "out"))
def adamw(
    masters: list[Tensor], gradients: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    steps: list[Tensor], out: list[Tensor], grad_scale: Tensor, found_inf: Tensor, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """A step of AdamW. out: the weights, which become the masters in their own dtype; all else is named as in
    `torch._fused_adamw_`."""
    torch._foreach_add_(steps, 1.0)
    if masters[0].device.type != "cuda":
        copies = [gradient.float() for gradient in gradients]
        torch._fused_adamw_(
            masters, copies, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
        torch._foreach_copy_(out, masters)
    else:
        from megatron.training.native.adamw_kernel import update

        counts = torch.stack(steps).double()
        corrections = torch.stack([1 - beta1**counts, (1 - beta2**counts).sqrt()], dim=1).float()
        numbers = lr, weight_decay, beta1, beta2, eps
        tensors = zip(masters, gradients, exp_avgs, exp_avg_sqs, out, corrections.unbind(), strict=True)
        for master, gradient, average, square, weight, own in tensors:
            update(master, gradient, average, square, weight, own, grad_scale, found_inf, *numbers)
    torch._foreach_sub_(steps, [found_inf] * len(steps))


@adamw.register_fake
def _(*given: Any) -> None:
    """Nothing is made."""
