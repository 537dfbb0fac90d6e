"""Wraps apex's FusedAdam so that its state is that of torch's AdamW, and it clips and skips without a host
sync."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.neox_arguments import ConfigError
from megatron.neox_arguments.optional_packages import import_compiled


class _Scaler(NamedTuple):
    """Stands in for a `grad_scaler`: it has the two methods that FusedAdam's `step` calls."""

    scale: Tensor
    found_inf: dict[torch.device, Tensor]

    def _get_scale_async(self) -> Tensor:
        return self.scale

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return self.found_inf


class ApexAdam(torch.optim.Optimizer):
    """Apex's FusedAdam (`capturable`, decoupled weight decay) over fp32 parameters on one device.

    As in torch's fused optimizers, `grad_scale` divides gradients, and `found_inf` leaves weights and state
    unchanged. A parameter's state is that of AdamW: `step`, `exp_avg` and `exp_avg_sq`. FusedAdam counts
    steps per group, so all parameters of a group share one `step` tensor.
    Raises PackageProblem if apex cannot be imported, ConfigError if the restored parameters of a group have
    different step counts.
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
        """Update every parameter that has a gradient."""
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scale, skip = self._unit_scale if scale is None else scale, self._zero_skip if skip is None else skip.view(1)
        for i, (group, kernel_group) in enumerate(zip(self.param_groups, self._kernel.param_groups, strict=True)):
            self._fill_state(i, [param for param in group["params"] if param.grad is not None])
            kernel_group["lr"].fill_(group["lr"])
            # FusedAdam adds 1 to this count unless its overflow flag is set, which an earlier step or group
            # may have left. The flag is cleared below, so every step is counted once.
            kernel_group["step"] = self._counts[i].to(torch.int32).view(1)
            for param in group["params"]:
                if param.numel() == 0:
                    param.grad = None  # FusedAdam's kernels may stop at an empty tensor
        self._kernel._dummy_overflow_buf.zero_()
        self._kernel.state = self.state
        self._kernel.step(grad_scaler=_Scaler(scale, {self._unit_scale.device: skip}))
        for count in self._counts:
            count += 1.0 - skip[0]

    def _fill_state(self, group: int, params: list[Tensor]) -> None:
        """Give parameters without state zero moments, and all parameters of the group one step count.

        group: index of the group. The count is that of the restored states; the host waits to read them.
        """
        count = self._counts[group]
        states = [self.state[param] for param in params]
        if all(state.get("step") is count for state in states):
            return
        step_counts = {float(state["step"]) for state in states if state} or {0.0}
        if len(step_counts) > 1 or (step_counts != {0.0} and not all(states)):
            raise ConfigError(
                ["apex: FusedAdam counts steps for all parameters together, but the restored parameters have different "
                 "step counts; write apex: false"]
            )  # fmt: skip
        count.fill_(step_counts.pop())
        for param, state in zip(params, states, strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(param)
            state["step"] = count
