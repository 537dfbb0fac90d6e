"""Computes learning-rate schedules as pure functions of the optimizer step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing import CheckpointError, ConfigChange, describe_changes, responsible_key
from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: warm-up, then a decay up to step `end`, then a constant rate.

    `schedule(k)` is the rate of update k + 1. Only the first update uses `schedule(1)`, as in GPT-NeoX,
    because a rate of 0 would waste it. Unlike GPT-NeoX's cosine, ours does not rise again after `end`.
    start_lr: the rate after warm-up, from which it decays. min_lr: the lowest rate after warm-up.
    warmup: number of steps, may be fractional.
    decay, decay_style: steps and shape of the final decay of `wsd`, as in Megatron-LM.
    """

    start_lr: float
    min_lr: float
    style: str
    warmup: float
    end: int
    decay: int = 0
    decay_style: str = "linear"

    def __call__(self, step: int) -> float:
        """Returns the learning rate after `step` updates."""
        if self.warmup > 0 and step <= self.warmup:
            return self.start_lr * max(1, step) / self.warmup  # may be below min_lr, as in GPT-NeoX
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

    def describe(self) -> str:
        """Returns one line for the log, such as `learning rate 0.0006 after 100 steps of warm-up, ...`."""
        decay = "then constant"
        if self.style != "constant":
            decay = f"{self.style} until step {self.end}, not below {self.min_lr:g}"
        return f"learning rate {self.start_lr:g} after {self.warmup:g} steps of warm-up, {decay}"

    def state_dict(self, num_iters: int) -> dict[str, float | int | str]:
        """Returns the `lr_scheduler` entry of a checkpoint in GPT-NeoX's form; `wsd`, which it lacks, adds
        two keys."""
        state: dict[str, float | int | str] = {
            "start_lr": self.start_lr,
            "warmup_iter": self.warmup,
            "num_iters": num_iters,
            "decay_style": self.style,
            "end_iter": self.end,
            "min_lr": self.min_lr,
        }
        if self.style == "wsd":
            state |= {"wsd_decay_iters": self.decay, "wsd_decay_style": self.decay_style}
        return state


def build_schedule(args: NeoXArgs) -> Schedule:
    """Returns the configured schedule. It ends at `lr_decay_iters`, else at `lr_decay_fraction` of
    `train_iters`.

    `lr_scaling` multiplies `lr` and `min_lr` by the data-parallel size or by its square root (arXiv
    1706.02677, 1404.5997).
    """
    if args.lr_decay_iters is not None:
        end = args.lr_decay_iters
    else:
        end = math.floor(args.train_iters * (args.lr_decay_fraction or 1.0))
    warmup = args.warmup * end if args.warmup_iters is None else float(args.warmup_iters)
    factor = 1.0
    if args.lr_scaling != "none":
        factor = args.data_parallel_size ** (0.5 if args.lr_scaling == "sqrt" else 1)
    decay = args.lr_wsd_decay_iters or 0  # required with wsd
    return Schedule(
        args.lr * factor, args.min_lr * factor, args.lr_decay_style, warmup, end, decay, args.lr_wsd_decay_style
    )


_END = ("lr_decay_iters", "lr_decay_fraction", "train_iters")
# For each field of Schedule: its name in GPT-NeoX's checkpoints, and the configuration keys that determine
# it.
_WRITTEN_AS = {
    "start_lr": ("start_lr", ("lr_scaling", "optimizer.params.lr")),
    "min_lr": ("min_lr", ("min_lr", "lr_scaling")),
    "style": ("decay_style", ("lr_decay_style",)),
    "end": ("end_iter", _END),
    "warmup": ("warmup_iter", ("warmup_iters", "warmup", *_END)),
    "decay": ("wsd_decay_iters", ("lr_wsd_decay_iters",)),
    "decay_style": ("wsd_decay_style", ("lr_wsd_decay_style",)),
}


def stored_schedule(saved: Mapping[str, Any]) -> Schedule:
    """Returns the schedule of a checkpoint's `lr_scheduler` entry, NeoX's or ours."""
    return Schedule(**{name: saved[label] for name, (label, _) in _WRITTEN_AS.items() if label in saved})


def resumed_schedule(
    schedule: Schedule, saved: Mapping[str, Any] | None, args: NeoXArgs, path: str, user_config: Mapping[str, Any]
) -> Schedule:
    """Returns the schedule of a resumed run: the configured `schedule`, or the checkpoint's.

    saved: the checkpoint's `lr_scheduler`, NeoX's or ours.
    path: the checkpoint, for messages.
    user_config: the keys that the checkpoint's user set; {} if it does not record them.

    Raises CheckpointError if the two schedules differ and neither override_lr_scheduler nor
    use_checkpoint_lr_scheduler chooses between them.
    """
    if args.override_lr_scheduler:
        return schedule
    if not saved:
        if args.use_checkpoint_lr_scheduler:
            raise CheckpointError(f"{path} holds no learning-rate schedule to use; remove use_checkpoint_lr_scheduler")
        return schedule
    stored = stored_schedule(saved)
    if args.use_checkpoint_lr_scheduler:
        return stored
    changed = []
    for name, (label, keys) in _WRITTEN_AS.items():
        stored_value, value = getattr(stored, name), getattr(schedule, name)
        if stored.style == schedule.style == "constant" and name in ("min_lr", "end"):
            continue  # a constant schedule has no end
        if stored.style == schedule.style != "wsd" and name in ("decay", "decay_style"):
            continue
        if stored_value == value or (
            name not in ("style", "decay_style") and math.isclose(stored_value, value, rel_tol=1e-9)
        ):
            continue
        key = responsible_key(keys, args, user_config)
        if key == "train_iters" and "train_epochs" in args.origins:  # train_iters was computed from train_epochs
            key = "train_epochs"
        changed.append(ConfigChange(key, f"{label} {value}", str(stored_value)))
    if changed:
        raise CheckpointError(
            f"{describe_changes(changed, args, f'the run of {path}')}; the learning-rate schedule differs: set "
            "override_lr_scheduler: true to use the configured one, or use_checkpoint_lr_scheduler: true to use the "
            "checkpoint's"
        )
    return schedule
