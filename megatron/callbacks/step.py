"""A training step as callbacks see it: its result, which nobody has waited for, and its row of metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megatron.data import Role

Parts = list[tuple[tuple[int, str], Tensor]]
"""((layer, name in the weight map), part of that parameter, any shape, maybe on the host)."""

OnGradients = Callable[[Parts], None]
"""Called between backward and update with the gradients of the whole batch that this rank owns, not clipped
and without fp16's loss scale; it must not wait for the device."""


@dataclass(frozen=True)
class StepResult:
    """What an engine says of one optimizer step. Tensors are read when the next step has been started; what
    an engine knows without asking the device may be a plain number.

    loss: scalar fp32, the mean over the step's weighted tokens or pairs; grad_norm: before clipping; skipped:
    weights are unchanged, because gradients were not finite or because none of the step's tokens is trained
    (untrained); spike: left out by skip_step_above_sigma; metrics: the objective's means, NaN where nothing
    counted; loss_scale: fp16's after the step, None in other precisions; finding: describes what this rank
    saw that was not finite, to be called when the step is known to be skipped.
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
    """One finished optimizer step, or step 0: a fresh run before its first step, whose result is None.

    seq_length: tokens it read of each sample, row_length: in rows of so many, of which the run has read
    row_tokens; role: of its data (`Batch.role`), "forget" where it unlearns, "on_policy" where it learns from
    what it wrote; row: its metrics by name, which callbacks add to; settled: whether the step's own values
    are in the row.
    """

    iteration: int
    consumed_samples: int
    seq_length: int
    result: StepResult | None
    consumed_tokens: int | None = None  # None: all tokens of the samples
    row_length: int = 0
    row_tokens: int = 0
    role: Role = "train"
    row: dict[str, float | int] = field(default_factory=dict)
    settled: bool = True

    def __post_init__(self) -> None:
        self.row["iteration"] = self.iteration
        self.row["consumed_samples"] = self.consumed_samples
        whole = self.consumed_samples * self.seq_length
        self.row["consumed_tokens"] = whole if self.consumed_tokens is None else self.consumed_tokens
