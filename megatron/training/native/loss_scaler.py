"""Scales fp16's loss, so that its gradients neither underflow nor overflow (arXiv 1710.03740)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.neox_arguments import NeoXArgs


class LossScaler:
    """The loss scale of a run in fp16, by the section `fp16` of its configuration.

    A fixed scale never changes. A dynamic one changes as DeepSpeed's DynamicLossScaler: an overflow halves
    it, `loss_scale_window` steps without overflow double it. It lives on the device, so the host need not
    wait.
    """

    def __init__(self, args: NeoXArgs, device: torch.device) -> None:
        section: Mapping[str, Any] = args.fp16 or {}
        self._is_dynamic = section["loss_scale"] == 0.0
        self._window, self._minimum = section["loss_scale_window"], section["min_loss_scale"]
        self._hysteresis, self._refills = section["hysteresis"], section["consecutive_hysteresis"]
        start = 2.0 ** section["initial_scale_power"] if self._is_dynamic else section["loss_scale"]
        # DeepSpeed's names and initial values.
        values = {"cur_scale": start, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": self._hysteresis}
        self._state = {name: torch.full((), float(value), device=device) for name, value in values.items()}

    @property
    def scale(self) -> Tensor:
        """The factor of the next step's loss, an fp32 scalar."""
        return self._state["cur_scale"]

    @torch.no_grad()
    def update(self, overflow: Tensor, untrained: Tensor) -> None:
        """End a step.

        overflow: boolean `[]`, a gradient is not finite. untrained: boolean `[]`, no token was trained, so
        the step does not count.
        """
        if not self._is_dynamic:
            return
        scale, iteration, last_overflow, patience = self._state.values()
        halves = overflow & (patience <= 1.0)
        steady = iteration - last_overflow - 1.0  # steps without overflow before this one
        grows = ~overflow & (steady > 0.0) & (steady % self._window == 0.0)
        refills = ~overflow if self._refills else grows
        new_scale = torch.where(halves, (scale / 2.0).clamp(min=self._minimum), torch.where(grows, 2.0 * scale, scale))
        new_patience = torch.where(refills, float(self._hysteresis), patience - (overflow & ~halves).float())
        values = (new_scale, iteration + 1.0, torch.where(overflow, iteration, last_overflow), new_patience)
        for old_value, value in zip(self._state.values(), values, strict=True):
            old_value.copy_(torch.where(untrained, old_value, value))

    def state(self) -> dict[str, float | int]:
        """Returns the state for a checkpoint, under DeepSpeed's names. The host waits for the device."""
        names = self._state if self._is_dynamic else ["cur_scale"]
        return {name: (float if name == "cur_scale" else int)(self._state[name]) for name in names}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` or DeepSpeed's engine had saved. A fixed scale stays the configured one."""
        for name, value in state.items():
            if self._is_dynamic and name in self._state:
                self._state[name].fill_(float(value))
