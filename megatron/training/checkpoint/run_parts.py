"""Defines the parts of a run that its checkpoints save or must match, and the run's progress."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.checkpointing import ParallelLayout
from megatron.data import Datasets, FileStamp, order_sha256
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.source import CheckpointSource
from megatron.training.engine import Engine
from megatron.training.schedules import Schedule


@dataclass
class TrainingProgress:
    """The progress of a run: its counters, and the states of its method and callbacks.

    iteration: number of steps done. consumed_samples: number of training samples read.
    skipped: number of steps whose update was skipped.
    consumed_tokens: number of tokens read; fewer than the samples have if a curriculum truncates them.
    row_tokens: with a curriculum, number of tokens read in rows of each length.
    validation_loss: of this iteration, if it was computed.
    method_state: state of the run's method (`training/method.py`).
    callback_states: states of the callbacks by name, as read from the checkpoint from which this start
        resumed.
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
    """Saves and loads the state of a run's method (`training/method.py`) in checkpoints. Here it has no
    state."""

    def initial_state(self) -> Any:
        """Returns the value of `TrainingProgress.method_state` at the start of a new run."""
        return None

    def save_state(self, state: Any) -> Mapping[str, Any]:
        """Returns the entries by which a checkpoint's model file saves `state`."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> Any:
        """Returns the method's state, read from `saved`, the content of a checkpoint's model file."""
        return self.initial_state()

    def data_record(self, state: Any) -> Mapping[str, Any]:
        """Returns the entries that the method adds to the record of the data in a checkpoint's manifest."""
        return {}

    def further_samples(self, record: Mapping[str, Any]) -> int:
        """Returns how many samples were read of each of the method's own datasets (`further_sets`).

        record: the record of the data in the checkpoint's manifest.
        """
        return 0

    def exports_weights(self, args: NeoXArgs) -> bool:
        """Returns whether the run exports its weights in HuggingFace's format between checkpoints."""
        return False


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that `CheckpointLoader` and `CheckpointWriter` use.

    files: from `data_fingerprint`. stamps: from `data_stamps`, before `files`. order: from `order_keys`.
    source: the checkpoint or model from which the run starts. schedule: as configured. settled: keys that the
    run has settled, with the user's values; None: unset.
    """

    args: NeoXArgs
    method: MethodState
    groups: ParallelGroups
    engine: Engine
    schedule: Schedule
    tokenizer: Tokenizer
    datasets: Datasets
    files: Mapping[str, Any]
    stamps: Mapping[str, FileStamp]
    order: Mapping[str, Any]
    source: CheckpointSource
    settled: Mapping[str, Any]
    logger: logging.Logger

    @property
    def model_rank(self) -> int:
        """The number in the name of this rank's mp_rank file: pipeline rank x tensor size + tensor rank."""
        return self.groups.rank("pipe") * self.groups.size("tensor") + self.groups.rank("tensor")

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout of the run, as manifests record it."""
        sizes = {axis: self.groups.size(axis) for axis in ("pipe", "data", "context", "tensor")}
        zero_stage, precision = self.engine.zero_stage, self.args.params_dtype
        return ParallelLayout(**sizes, zero_stage=zero_stage, precision=precision, world_size=self.groups.world_size)

    def data_record(self, consumed_samples: int) -> dict[str, Any]:
        """Returns the record of the data for a manifest, at the position after `consumed_samples` samples."""
        train = self.datasets.train
        has_samples = train is not None and consumed_samples <= len(train)
        digest = order_sha256(train, consumed_samples) if has_samples and train is not None else None
        ends = self.datasets.segment_ends
        return {"files": self.files, "order": self.order, "laid_out": ends, "consumed_sha256": digest}


@dataclass(frozen=True)
class Origin:
    """Facts about the start of a run, known once its start weights or its checkpoint are loaded.

    schedule: the configured one, or with `use_checkpoint_lr_scheduler` the checkpoint's. run_id: the resumed
    run's name. saved_at: iteration of its last checkpoint. Both are None for a new run. base: from
    `describe_base`, if checkpoints hold only adapters. zero_tokens: token ids with zero embeddings in the
    start weights, among the rows that this rank has loaded; None: the run starts from no loaded weights.
    """

    schedule: Schedule
    run_id: str | None = None
    saved_at: int | None = None
    base: Mapping[str, Any] | None = None
    zero_tokens: frozenset[int] | None = None


def zero_tokens(weights: Mapping[int, Mapping[str, Tensor]], tensor_rank: int) -> frozenset[int]:
    """Returns the ids of tokens whose embeddings are zero, among the rows of this tensor rank."""
    words = weights.get(0, {}).get("word_embeddings.weight")
    if words is None:
        return frozenset()
    rows = (words == 0).all(dim=1).nonzero().flatten() + tensor_rank * len(words)
    return frozenset(rows.tolist())
