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
    warmup: steps, may be fractional. decay: steps of the final decay of `wsd`.
    """

    start_lr: float
    min_lr: float
    style: str
    warmup: float
    end: int
    decay: int = 0

    def __call__(self, step: int) -> float:
        """Learning rate after `step` updates."""
        if self.warmup > 0 and step <= self.warmup:
            return max(self.start_lr * max(1, step) / self.warmup, self.min_lr)
        step = min(step, self.end)
        length = self.end - self.warmup
        elapsed = step - self.warmup
        return max(self._decayed(elapsed, length), self.min_lr) if length > 0 else self.start_lr

    def _decayed(self, elapsed: float, length: float) -> float:
        if self.style == "linear":
            return self.start_lr * (length - elapsed) / length
        if self.style == "cosine":
            return self.min_lr + (self.start_lr - self.min_lr) / 2.0 * (math.cos(math.pi * elapsed / length) + 1.0)
        if self.style == "wsd":
            left = min((length - elapsed) / self.decay, 1.0)
            return self.min_lr + (self.start_lr - self.min_lr) * left
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
    decay = args.lr_wsd_decay_iters if args.lr_wsd_decay_iters is not None else max(1, end // 10)
    return Schedule(args.lr, args.min_lr, args.lr_decay_style, args.warmup * end, end, decay)
