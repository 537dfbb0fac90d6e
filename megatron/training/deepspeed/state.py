"""Saves and loads DeepSpeed's part of a checkpoint: counters, fp16's loss scale, and layout-bound optimizer
state.

`optimizer_parts` saves and loads optimizer state by parameter.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpointing import OpenCheckpoint, load_tensors
from megatron.mpu import ParallelGroups
from megatron.training.deepspeed.optimizers import fitting_state

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineState:
    """The state of DeepSpeed's engine, `ds`."""

    def __init__(self, ds: Any, groups: ParallelGroups, dtype: torch.dtype, zero_stage: int) -> None:
        self._ds, self._groups, self._zero_stage = ds, groups, zero_stage
        self._scaler = ds.optimizer.loss_scaler if dtype == torch.float16 else None

    def model_state(self) -> dict[str, Any]:
        """Returns DeepSpeed's part of a `mp_rank_RR_model_states.pt`, and the state of fp16's loss scale.

        It has no weights, and the optimizer's state only without ZeRO. The loss scale is {} in other
        precisions.
        """
        scaler = {key: getattr(self._scaler, key) for key in _SCALER if hasattr(self._scaler, key)}
        return {**self._ds._common_checkpoint_state(None, self._zero_stage > 0, False), "loss_scaler": scaler}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the run's counters, and a saved loss scale where there is one."""
        self._ds.global_steps, self._ds.global_samples = state["iteration"], state["consumed_samples"]
        self._ds.skipped_steps = state["skipped_steps"]
        for key, value in state.get("loss_scaler", {}).items():
            if hasattr(self._scaler, key):
                setattr(self._scaler, key, value)

    def zero_state(self) -> dict[str, Any]:
        """Returns this rank's `*zero_pp_rank_D_mp_rank_RR_optim_states.pt`; only with ZeRO."""
        return {
            "optimizer_state_dict": self._ds.optimizer.state_dict(),
            "ds_config": self._ds.config,
            "ds_version": version("deepspeed"),
        }

    def load_optimizer_state(self, model_state: Mapping[str, Any], checkpoint: OpenCheckpoint, name: str) -> None:
        """Restore this rank's optimizer state.

        Without ZeRO it is `model_state["optimizer"]`. With ZeRO the file `name` holds it (`zero_state`), fp32
        master weights included.
        """
        optimizer = self._ds.optimizer
        if self._zero_stage == 0:
            optimizer.load_state_dict(fitting_state(model_state["optimizer"], optimizer))
            return
        safe = (fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler)
        state = load_tensors(checkpoint.file(name), extra_safe=safe)["optimizer_state_dict"]
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
