"""A stand-in for NVIDIA's apex, by its fused_adam.py, multi_tensor_adam.cu and fused_layer_norm.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.stand_ins.signatures import bind


class FusedAdam(torch.optim.Optimizer):
    """Capturable FusedAdam. It counts steps by group before it knows this step's flag, one for all groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        call = bind("apex", "FusedAdam", args, kwargs)
        assert call["capturable"] and call["adam_w_mode"] and not call["amsgrad"]
        lr = torch.tensor(call["lr"], dtype=torch.float32)
        defaults = {"lr": lr, **{key: call[key] for key in ("bias_correction", "betas", "eps", "weight_decay")}}
        super().__init__(call["params"], defaults)
        for group in self.param_groups:
            group["lr"] = group["lr"].to(group["params"][0].device)
        self._step_supports_amp_scaling = True
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """The update, unless `grad_scaler` found something that is not finite."""
        scaler = bind("apex", "FusedAdam.step", args, kwargs)["grad_scaler"]
        for group in self.param_groups:
            params = group["params"]
            if "step" in group:
                group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            else:
                group["step"] = torch.tensor([1], dtype=torch.int)
            assert group["step"].dtype == torch.int32 and group["lr"].dtype == torch.float32
            device = params[0].device
            overflow = torch.zeros(1) if scaler is None else scaler._check_inf_per_device(self)[device]
            self._dummy_overflow_buf.copy_(overflow)
            scale = torch.ones(1) if scaler is None else scaler._get_scale_async()
            for param in params:
                if param.grad is None:
                    continue
                assert param.dtype == param.grad.dtype == torch.float32
                state = self.state[param]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                if int(self._dummy_overflow_buf) != 1:
                    _adam(param, state, group, scale)


def _adam(param: Tensor, state: dict[str, Tensor], group: dict[str, Any], scale: Tensor) -> None:
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2) in fp64."""
    (beta1, beta2), count = group["betas"], int(group["step"])
    gradient = param.grad.double() / scale.double()
    param.grad.copy_(gradient)  # the kernel leaves it unscaled
    exp_avg = beta1 * state["exp_avg"].double() + (1 - beta1) * gradient
    exp_avg_sq = beta2 * state["exp_avg_sq"].double() + (1 - beta2) * gradient**2
    direction = (exp_avg / (1 - beta1**count)) / ((exp_avg_sq / (1 - beta2**count)).sqrt() + group["eps"])
    param.copy_(param.double() - group["lr"].double() * (direction + group["weight_decay"] * param.double()))
    state["exp_avg"].copy_(exp_avg)
    state["exp_avg_sq"].copy_(exp_avg_sq)


def _norm(name: str, centred: bool, affine: bool) -> Callable[..., Tensor]:
    """The function of this name: over the last dimension, in fp64."""

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        call = bind("apex", name, args, kwargs)
        x = call["input"]
        assert tuple(call["normalized_shape"]) == x.shape[-1:] and not call["memory_efficient"]
        wide = x.double() - (x.double().mean(-1, keepdim=True) if centred else 0.0)
        out = (wide / (wide.square().mean(-1, keepdim=True) + call["eps"]).sqrt()).to(x.dtype)
        if not affine:
            return out
        parts = [call[part] for part in ("weight", "bias") if part in call]
        assert all(part.dtype == x.dtype for part in parts), "the kernel's types are one"
        weight, bias = (*(part.double() for part in parts), 0.0)[:2]
        return (out.double() * weight + bias).to(x.dtype)

    return norm


def modules() -> dict[str, dict[str, Any]]:
    """The modules that an installed apex has, as far as we ask for them."""
    names = [f"fused_{kind}_norm{affine}" for kind in ("layer", "rms") for affine in ("", "_affine")]
    norms = {name: _norm(name, "layer" in name, "affine" in name) for name in names}
    return {"apex": {}, "apex.optimizers": {"FusedAdam": FusedAdam}, "apex.normalization": {},
            "apex.normalization.fused_layer_norm": norms, "amp_C": {}}  # fmt: skip
