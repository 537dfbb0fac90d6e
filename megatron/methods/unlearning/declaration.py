"""Declares unlearning: its keys and datasets, and which runs use it."""

from typing import Any

from megatron.methods.unlearning.keys import FORGET_LOSSES, UnlearningKeys
from megatron.methods.unlearning.schedule import ascent_steps, is_ascent
from megatron.neox_arguments.methods import FurtherSet, MethodDeclaration


def forget_needs_reference(args: object) -> bool:
    """Returns whether the loss on `ga_dataset` needs a reference model's log-probabilities (`ga_loss_type:
    npo`)."""
    keys = UnlearningKeys.read_from(args)
    return keys.ga_dataset is not None and FORGET_LOSSES[keys.ga_loss_type].needs_reference


def retains_by_divergence(args: object) -> bool:
    """Returns whether the loss on `gd_retain_dataset` is the KL from a reference model (`gd_retain_loss_type:
    kl`)."""
    keys = UnlearningKeys.read_from(args)
    return keys.ga_dataset is not None and keys.gd_mode and keys.gd_retain_loss_type == "kl"


def _log_lines(args: Any) -> list[str]:
    """Returns a log line with the number of steps that train on the forget set; [] if the run does not
    unlearn."""
    keys = UnlearningKeys.read_from(args)
    if keys.ga_dataset is None:
        return []
    count = ascent_steps(keys, 0, args.train_iters)
    is_ascending = keys.ga_loss_type == "nll"
    objective = f"minus the loss of {keys.ga_dataset}" if is_ascending else f"{keys.ga_loss_type} on {keys.ga_dataset}"
    if keys.gd_mode:
        plus = "" if is_ascending else "plus "
        objective = f"{keys.gd_retain_weight:g} x the loss of {keys.gd_retain_dataset} {plus}{objective}"
    if not count:
        no_steps = f"none of {args.train_iters} steps trains on it (ga_mode: {keys.ga_mode}), so nothing is unlearned"
        return [f"ga_dataset: {no_steps}"]
    first_step = next(step for step in range(args.train_iters) if is_ascent(keys, step)) + 1
    return [f"ga_dataset: {count} of {args.train_iters} steps minimise {objective}; the first is step {first_step}"]


METHOD = MethodDeclaration(
    trains=lambda args: args.train_impl == "normal" and UnlearningKeys.read_from(args).ga_dataset is not None,
    keys=UnlearningKeys,
    sets={
        "forget": FurtherSet("ga_dataset", "ga_label_dataset", "ga_dataset_impl", is_scored=True),
        "retain": FurtherSet("gd_retain_dataset", "gd_retain_label_dataset", "gd_retain_dataset_impl", "gd_mode"),
    },
    num_further_steps=lambda args, start, end: ascent_steps(UnlearningKeys.read_from(args), start, end),
    sets_per_step=lambda args: 2 if UnlearningKeys.read_from(args).gd_mode else 1,
    needs_reference=lambda args: forget_needs_reference(args) or retains_by_divergence(args),
    log_lines=_log_lines,
    conditions=lambda args: [("gd_retain_dataset", "gd_mode: true", UnlearningKeys.read_from(args).gd_mode)],
)
