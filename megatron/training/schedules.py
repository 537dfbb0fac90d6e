"""Learning-rate schedules as pure functions of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a decay that ends at `end` and stays there.

    Steps count from 0: `lr(k)` is used by update k + 1. The first update uses `lr(1)`, as upstream (a learning rate
    of 0 would waste it). Past `end` the value is clamped (upstream's cosine rises again there).
    warmup: steps, may be fractional. decay, decay_style: steps and shape of the final decay of `wsd` (Megatron-LM's).
    """

    start_lr: float
    min_lr: float
    style: str
    warmup: float
    end: int
    decay: int = 0
    decay_style: str = "linear"

    def __call__(self, step: int) -> float:
        """Learning rate after `step` updates."""
        if self.warmup > 0 and step <= self.warmup:
            return self.start_lr * max(1, step) / self.warmup  # below min_lr too, as upstream
        step = min(step, self.end)
        length = self.end - self.warmup
        elapsed = step - self.warmup
        return max(self._decayed(elapsed, length), self.min_lr) if length > 0 else self.start_lr

    def _decayed(self, elapsed: float, length: float) -> float:
        if self.style == "linear":
            return self.start_lr * (length - elapsed) / length
        if self.style == "cosine":
            return self.min_lr + (self.start_lr - self.min_lr) / 2.0 * (math.cos(math.pi * elapsed / length) + 1.0)
        if self.style == "exponential":
            return self.start_lr * math.exp(-0.693 * elapsed / length)  # half at the end
        if self.style == "wsd":
            share = max(0.0, elapsed - (length - self.decay)) / self.decay
            shapes = {
                "linear": 1.0 - share,
                "cosine": 0.5 * (math.cos(math.pi * share) + 1.0),
                "exponential": 2.0 * 0.5**share - 1.0,
                "minus_sqrt": 1.0 - math.sqrt(share),
            }
            return self.min_lr + (self.start_lr - self.min_lr) * shapes[self.decay_style]
        return self.start_lr  # constant

    def state_dict(self, num_iters: int) -> dict[str, float | int | str]:
        """NeoX's `lr_scheduler` entry of a checkpoint."""
        return {
            "start_lr": self.start_lr,
            "warmup_iter": self.warmup,
            "num_iters": num_iters,
            "decay_style": self.style,
            "end_iter": self.end,
            "min_lr": self.min_lr,
        }


def build_schedule(args: NeoXArgs) -> Schedule:
    """The schedule of `lr_decay_style`; its length is `lr_decay_iters`, else a fraction of `train_iters`."""
    if args.lr_decay_iters is not None:
        end = args.lr_decay_iters
    else:
        end = math.floor(args.train_iters * (args.lr_decay_fraction or 1.0))
    decay = args.lr_wsd_decay_iters or 0  # required with wsd
    return Schedule(args.lr, args.min_lr, args.lr_decay_style, args.warmup * end, end, decay, args.lr_wsd_decay_style)
