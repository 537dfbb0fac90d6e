"""A training step as callbacks see it: its result, which nobody has waited for, and its row of metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

Parts = list[tuple[tuple[int, str], Tensor]]
"""((layer, name in the weight map), part of that parameter, any shape, maybe on the host)."""

OnGradients = Callable[[Parts], None]
"""Called between backward and update with this rank's gradients of the full batch.

They are not clipped and without fp16's loss scale. The call must not wait for the device."""


@dataclass(frozen=True)
class StepResult:
    """An engine's report of one optimizer step.

    Tensors are read once the next step has begun. Values that the engine knows without waiting for the device
    may be plain numbers.

    loss: scalar fp32, the mean over the step's weighted tokens or pairs.
    grad_norm: before clipping.
    skipped: the weights are unchanged, because gradients were not finite or the step is `untrained`.
    spike: the update was left out by `skip_step_above_sigma`.
    metrics: means of the objective's metrics; NaN if nothing was counted.
    untrained: none of the step's tokens is trained.
    loss_scale: fp16's after the step; None in other precisions.
    finding: returns a description of the non-finite values that this rank saw. Call it only once the step is
        known to be skipped.
    """

    loss: Tensor
    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    spike: Tensor | bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    untrained: Tensor | bool = False
    loss_scale: Tensor | float | None = None
    finding: Callable[[], str | None] = lambda: None


@dataclass
class Step:
    """One finished optimizer step, or step 0: a fresh run before its first step.

    seq_length: tokens that the step read of each sample.
    result: the engine's report; None if no step was taken, as for step 0.
    row_length: tokens in a row of the step.
    row_tokens: tokens that the run has read in rows of this length; counted only with a curriculum.
    role: the data of the step (`StepData.role`): "forget" if it unlearns, "on_policy" if the student learns
        from text that it wrote.
    row: metrics by name; callbacks add to it.
    settled: the row holds the step's own values.
    """

    iteration: int
    consumed_samples: int
    seq_length: int
    result: StepResult | None
    consumed_tokens: int | None = None  # None: all tokens of the samples
    row_length: int = 0
    row_tokens: int = 0
    role: str = "train"
    row: dict[str, float | int] = field(default_factory=dict)
    settled: bool = True

    def __post_init__(self) -> None:
        self.row["iteration"] = self.iteration
        self.row["consumed_samples"] = self.consumed_samples
        full = self.consumed_samples * self.seq_length
        self.row["consumed_tokens"] = full if self.consumed_tokens is None else self.consumed_tokens
