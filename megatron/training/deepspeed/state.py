"""The part of a checkpoint that DeepSpeed holds: its counters, the optimizer's state, fp32 master weights.

By parameter the state goes in and out through `parts`; here is what is bound to the layout it was written in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from megatron.mpu import ParallelGroups
from megatron.training.deepspeed.optimizer_parts import OptimizerParts
from megatron.training.optimizers import fitting_state

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineState:
    """params: (layer, name, trained parameter) in order of the optimizer's groups; with ZeRO, as they were before it.
    stage_size: elements of this rank's part of its stage, trained or not."""

    def __init__(
        self,
        ds: Any,
        params: Sequence[tuple[int, str, nn.Parameter]],
        groups: ParallelGroups,
        dtype: torch.dtype,
        zero_stage: int,
        stage_size: int,
    ) -> None:
        self._ds, self.groups, self.dtype, self.zero_stage = ds, groups, dtype, zero_stage
        self._ordered, self._stage_size = [param for _, _, param in params], stage_size
        self.parts = OptimizerParts(params, ds.optimizer, groups, dtype, zero_stage)

    def model_state(self) -> dict[str, Any]:
        """DeepSpeed's part of a `mp_rank_RR_model_states.pt` (no weights; the optimizer's state when not ZeRO)."""
        return self._ds._common_checkpoint_state(None, self.zero_stage > 0, False)

    def loss_scaler(self) -> dict[str, float]:
        """fp16's loss scale and where it stands between two changes; {} in other precisions."""
        scaler = self._ds.optimizer.loss_scaler if self.dtype == torch.float16 else None
        return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}

    def set_loss_scaler(self, saved: Mapping[str, float]) -> None:
        """Go on with a saved loss scale, where there is one."""
        scaler = self._ds.optimizer.loss_scaler if self.dtype == torch.float16 else None
        for key, value in saved.items():
            if scaler is not None and hasattr(scaler, key):
                setattr(scaler, key, value)

    def zero_state(self) -> dict[str, Any]:
        """This rank's `*zero_pp_rank_D_mp_rank_RR_optim_states.pt`; only with ZeRO."""
        return {
            "optimizer_state_dict": self._ds.optimizer.state_dict(),
            "ds_config": self._ds.config,
            "ds_version": version("deepspeed"),
        }

    def checkpoint_bytes(self, optimizer: bool = True) -> int:
        """About what this rank adds to a checkpoint: weights (data rank 0) and its part of Adam's fp32 state."""
        elements = sum(math.prod(getattr(p, "ds_shape", p.shape)) for p in self._ordered)
        first = self.groups.rank("data") == 0
        weights = self._stage_size * torch.finfo(self.dtype).bits // 8 if first else 0
        if not optimizer:
            return weights
        if self.zero_stage == 0:
            return weights + (8 * elements if first else 0)
        return weights + 12 * elements // self.groups.size("data")

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restore this rank's optimizer state: `model_state()["optimizer"]` without ZeRO, else `zero_state()`'s
        `optimizer_state_dict`, fp32 master weights included."""
        optimizer = self._ds.optimizer
        if self.zero_stage == 0:
            optimizer.load_state_dict(fitting_state(state, optimizer))
            return
        base = "optimizer_state_dict" if self.zero_stage == 3 else "base_optimizer_state"
        everyone: list[Any] = [None] * self.groups.size("data")
        everyone[self.groups.rank("data")] = {**state, base: fitting_state(state[base], optimizer.optimizer)}
        optimizer.load_state_dict(
            state_dict_list=everyone,
            load_optimizer_states=True,
            load_from_fp32_weights=True,
            checkpoint_folder=None,
            load_serial=None,
            param_shapes=self._ds._get_zero_param_shapes(),
        )
