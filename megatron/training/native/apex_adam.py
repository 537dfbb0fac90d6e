"""FusedAdam of NVIDIA's apex with the state of torch's AdamW, clipped and skipped without a host sync."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.neox_arguments import ConfigError
from megatron.neox_arguments.optional_packages import import_compiled


class _Scaler(NamedTuple):
    """The methods of a `grad_scaler` that FusedAdam's `step` calls."""

    scale: Tensor
    found_inf: dict[torch.device, Tensor]

    def _get_scale_async(self) -> Tensor:
        return self.scale

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return self.found_inf


class ApexAdam(torch.optim.Optimizer):
    """FusedAdam (`capturable`, decoupled weight decay) over fp32 parameters on one device.

    `grad_scale` divides gradients, and `found_inf` leaves all values unchanged, as in torch's fused
    optimizers. A parameter's state is AdamW's: `step`, `exp_avg` and `exp_avg_sq`. FusedAdam counts steps by
    group, so `step` is one tensor for all parameters of a group.
    Raises PackageProblem if apex cannot be imported, ConfigError if parameters of a group are restored at
    different steps.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in self.param_groups]
        kernel = import_compiled("apex.optimizers", "FusedAdam").FusedAdam
        self._kernel = kernel(groups, lr=lr, betas=betas, eps=eps, adam_w_mode=True, capturable=True)
        device = self.param_groups[0]["params"][0].device
        self._counts = [torch.zeros((), device=device) for _ in groups]
        self._unit_scale, self._zero_skip = torch.ones(1, device=device), torch.zeros(1, device=device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scale, skip = self._unit_scale if scale is None else scale, self._zero_skip if skip is None else skip.view(1)
        for i, (group, kernel_group) in enumerate(zip(self.param_groups, self._kernel.param_groups, strict=True)):
            self._fill_state(i, [param for param in group["params"] if param.grad is not None])
            kernel_group["lr"].fill_(group["lr"])
            # FusedAdam adds 1, unless the flag is up that the last step, or the group before, has left. With
            # that flag down its first update is the first, and one after a skipped step is counted once.
            kernel_group["step"] = self._counts[i].to(torch.int32).view(1)
            for param in group["params"]:
                if param.numel() == 0:
                    param.grad = None  # its kernels may end at an empty tensor
        self._kernel._dummy_overflow_buf.zero_()
        self._kernel.state = self.state
        self._kernel.step(grad_scaler=_Scaler(scale, {self._unit_scale.device: skip}))
        for count in self._counts:
            count += 1.0 - skip[0]

    def _fill_state(self, group: int, params: list[Tensor]) -> None:
        """Fill the state of parameters that have none with zeros.

        All parameters of the group get one step count, from the restored states; the host reads each of
        those.
        """
        count = self._counts[group]
        states = [self.state[param] for param in params]
        if all(state.get("step") is count for state in states):
            return
        step_counts = {float(state["step"]) for state in states if state} or {0.0}
        if len(step_counts) > 1 or (step_counts != {0.0} and not all(states)):
            raise ConfigError(
                ["apex: FusedAdam counts steps for all parameters together, and here some have taken more than "
                 "others; write apex: false"]
            )  # fmt: skip
        count.fill_(step_counts.pop())
        for param, state in zip(params, states, strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(param)
            state["step"] = count
