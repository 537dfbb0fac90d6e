"""The parts of a run that its checkpoints hold, or that they must match."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing import ParallelLayout
from megatron.data import Datasets
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.progress import MethodState
from megatron.training.checkpoint.same_run import data_record
from megatron.training.checkpoint.source import CheckpointSource
from megatron.training.engine import Engine
from megatron.training.schedules import Schedule


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that `CheckpointLoader` and `CheckpointWriter` share.

    files: `data_fingerprint`. order: `order_keys`. source: what the run starts from. schedule: as configured.
    """

    args: NeoXArgs
    method: MethodState
    groups: ParallelGroups
    engine: Engine
    schedule: Schedule
    tokenizer: Tokenizer
    datasets: Datasets
    files: Mapping[str, Any]
    order: Mapping[str, Any]
    source: CheckpointSource
    logger: logging.Logger

    @property
    def model_rank(self) -> int:
        """Returns the number of this rank's mp_rank file, as in NeoX: pipeline rank x tensor size + tensor
        rank."""
        return self.groups.rank("pipe") * self.groups.size("tensor") + self.groups.rank("tensor")

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the run, as manifests record it."""
        sizes = {axis: self.groups.size(axis) for axis in ("pipe", "data", "tensor")}
        return ParallelLayout(
            **sizes,
            zero_stage=self.engine.zero_stage,
            precision=self.args.params_dtype,
            world_size=self.groups.world_size,
        )

    def data_record(self, consumed_samples: int) -> dict[str, Any]:
        """Returns the manifest's record of the data at this position."""
        return data_record(self.files, self.order, self.datasets, consumed_samples)


@dataclass(frozen=True)
class Origin:
    """Records what a run goes on with, once its start is loaded.

    schedule: its own, or with `use_checkpoint_lr_scheduler` the checkpoint's. run_id, saved_at: name and
    iteration of the run's last checkpoint; None for a new run. base: `describe_base`, if adapters alone are
    saved.
    """

    schedule: Schedule
    run_id: str | None = None
    saved_at: int | None = None
    base: Mapping[str, Any] | None = None
