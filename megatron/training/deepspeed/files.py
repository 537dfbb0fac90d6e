"""DeepSpeed's reads and writes, which are ours."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpointing import FileRecord, load_tensors, save_tensors


class CheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's reads and writes: no pickle beyond an allow-list, every file synced and hashed."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[FileRecord] = []

    def save(self, state_dict: Any, path: str) -> None:
        self.records.append(save_tensors(state_dict, path))

    def load(self, path: str, map_location: Any = None) -> Any:
        safe = (fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler)
        return load_tensors(path, extra_safe=safe)
