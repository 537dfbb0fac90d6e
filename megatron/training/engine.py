"""What a training engine is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. loss: scalar fp32 tensor, the mean over the step's weighted tokens or pairs (not yet read
    from the device); grad_norm: before clipping; skipped: weights are unchanged, because gradients were not finite or
    because none of the step's tokens is trained (untrained)."""

    loss: Tensor
    grad_norm: Tensor | float | None
    skipped: bool
    spike: bool = False  # left out by skip_step_above_sigma
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # the objective's means; NaN where nothing counted
    untrained: bool = False
