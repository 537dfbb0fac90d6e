"""How far a run is, as its checkpoints record it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class UnlearningProgress:
    """How far a run is in its forget set. samples: of it and of the retain set, those of steps that were left
    out too; steps, left_out: on the forget set; burst_left_out: whether the burst that is under way is.
    last_loss: of the last step, average_loss: the moving average, both None when they are not known."""

    samples: int = 0
    steps: int = 0
    left_out: int = 0
    burst_left_out: bool = False
    last_loss: float | None = None
    average_loss: float | None = None


@dataclass
class TrainingProgress:
    """How far a run is. skipped: steps whose update the optimizer refused; consumed_tokens: fewer than those
    of all samples when a curriculum cuts them; row_tokens: those read in rows of each length, with a
    curriculum; validation_loss: of this iteration, where it was computed; unlearning: its own counts."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    consumed_tokens: int = 0
    row_tokens: dict[int, int] = field(default_factory=dict)
    validation_loss: float | None = None
    unlearning: UnlearningProgress = UnlearningProgress()
