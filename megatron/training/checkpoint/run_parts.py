"""The parts of a run that its checkpoints hold, or that they must match, and how far it is."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpointing import ParallelLayout
from megatron.data import Datasets, order_sha256
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.source import CheckpointSource
from megatron.training.engine import Engine
from megatron.training.schedules import Schedule


@dataclass
class TrainingProgress:
    """The progress of a run.

    skipped: steps whose update the optimizer skipped.
    consumed_tokens: tokens read; fewer than the samples have if a curriculum truncates them.
    row_tokens: with a curriculum, tokens read in rows of each length.
    validation_loss: of this iteration, if it was computed.
    method_state: of the run's method (`training/method.py`).
    callback_states: of the run's callbacks by name, as the checkpoint has them that this start resumed from.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    consumed_tokens: int = 0
    row_tokens: dict[int, int] = field(default_factory=dict)
    validation_loss: float | None = None
    method_state: Any = None
    callback_states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class MethodState:
    """The state of a run's method (`training/method.py`) in checkpoints. The base class has none."""

    def initial_state(self) -> Any:
        """Returns `TrainingProgress.method_state` of a new run."""
        return None

    def save_state(self, state: Any) -> Mapping[str, Any]:
        """Returns the entries of a checkpoint's model file that hold `state`."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> Any:
        """Returns the state that a checkpoint's model file holds."""
        return self.initial_state()

    def data_record(self, state: Any) -> Mapping[str, Any]:
        """Returns the method's entries of the manifest's record of the data."""
        return {}

    def further_samples(self, record: Mapping[str, Any]) -> int:
        """Returns the samples that were read of each of `further_sets`. record: as in the manifest."""
        return 0

    def exports_weights(self, args: NeoXArgs) -> bool:
        """Returns whether the run exports its weights in HuggingFace's format between checkpoints."""
        return False


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
        zero_stage, precision = self.engine.zero_stage, self.args.params_dtype
        return ParallelLayout(**sizes, zero_stage=zero_stage, precision=precision, world_size=self.groups.world_size)

    def data_record(self, consumed_samples: int) -> dict[str, Any]:
        """Returns the manifest's record of the data at this position."""
        train = self.datasets.train
        has_samples = train is not None and consumed_samples <= len(train)
        digest = order_sha256(train, consumed_samples) if has_samples and train is not None else None
        ends = self.datasets.segment_ends
        return {"files": self.files, "order": self.order, "laid_out": ends, "consumed_sha256": digest}


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
