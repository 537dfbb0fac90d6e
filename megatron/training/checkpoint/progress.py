"""How far a run is, as its checkpoints record it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.neox_arguments import NeoXArgs


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


class MethodState(Protocol):
    """The state of a run's method (`training/method.py`) in checkpoints."""

    def initial_state(self) -> Any:
        """Returns `TrainingProgress.method_state` of a new run."""

    def save_state(self, state: Any) -> Mapping[str, Any]:
        """Returns the entries of a checkpoint's model file that hold `state`."""

    def load_state(self, saved: Mapping[str, Any]) -> Any:
        """Returns the state that a checkpoint's model file holds."""

    def data_record(self, state: Any) -> Mapping[str, Any]:
        """Returns the method's entries of the manifest's record of the data."""

    def further_samples(self, record: Mapping[str, Any]) -> int:
        """Returns the samples that were read of each of `further_sets`. record: as in the manifest."""

    def exports_weights(self, args: NeoXArgs) -> bool:
        """Returns whether the run exports its weights in HuggingFace's format between checkpoints."""
