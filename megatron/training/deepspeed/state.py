"""The part of a checkpoint that DeepSpeed holds: its counters, fp16's loss scale, and the optimizer's state
where that is bound to the layout it was written in. By parameter it goes in and out through
`optimizer_parts`."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpointing import load_tensors
from megatron.mpu import ParallelGroups
from megatron.training.deepspeed.optimizers import fitting_state

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineState:
    """ds: DeepSpeed's engine."""

    def __init__(self, ds: Any, groups: ParallelGroups, dtype: torch.dtype, zero_stage: int) -> None:
        self._ds, self._groups, self._zero_stage = ds, groups, zero_stage
        self._scaler = ds.optimizer.loss_scaler if dtype == torch.float16 else None

    def model_state(self) -> dict[str, Any]:
        """DeepSpeed's part of a `mp_rank_RR_model_states.pt` (no weights; the optimizer's state when not
        ZeRO), and fp16's loss scale and where it stands between two changes ({} in other precisions)."""
        scaler = {key: getattr(self._scaler, key) for key in _SCALER if hasattr(self._scaler, key)}
        return {**self._ds._common_checkpoint_state(None, self._zero_stage > 0, False), "loss_scaler": scaler}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the run's counters, and with a saved loss scale where there is one."""
        self._ds.global_steps, self._ds.global_samples = state["iteration"], state["consumed_samples"]
        self._ds.skipped_steps = state["skipped_steps"]
        for key, value in state.get("loss_scaler", {}).items():
            if hasattr(self._scaler, key):
                setattr(self._scaler, key, value)

    def zero_state(self) -> dict[str, Any]:
        """This rank's `*zero_pp_rank_D_mp_rank_RR_optim_states.pt`; only with ZeRO."""
        return {
            "optimizer_state_dict": self._ds.optimizer.state_dict(),
            "ds_config": self._ds.config,
            "ds_version": version("deepspeed"),
        }

    def load_optimizer_state(self, model_state: Mapping[str, Any], file: Path) -> None:
        """Restore this rank's optimizer state: `model_state["optimizer"]` without ZeRO, else that of the
        `file` with `zero_state`, fp32 master weights included."""
        optimizer = self._ds.optimizer
        if self._zero_stage == 0:
            optimizer.load_state_dict(fitting_state(model_state["optimizer"], optimizer))
            return
        safe = (fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler)
        state = load_tensors(file, extra_safe=safe)["optimizer_state_dict"]
        base = "optimizer_state_dict" if self._zero_stage == 3 else "base_optimizer_state"
        everyone: list[Any] = [None] * self._groups.size("data")
        everyone[self._groups.rank("data")] = {**state, base: fitting_state(state[base], optimizer.optimizer)}
        optimizer.load_state_dict(
            state_dict_list=everyone,
            load_optimizer_states=True,
            load_from_fp32_weights=True,
            checkpoint_folder=None,
            load_serial=None,
            param_shapes=self._ds._get_zero_param_shapes(),
        )
