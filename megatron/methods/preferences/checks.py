"""Checks the configuration keys of preference training."""

from megatron.methods.preferences.keys import PreferencesKeys
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import losses_of


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes problems with the keys of preference training. Does nothing unless `train_impl` is dpo."""
    if args.train_impl != "dpo":
        return
    keys = PreferencesKeys.read_from(args)
    losses = (keys.dpo_loss_type,) if isinstance(keys.dpo_loss_type, str) else keys.dpo_loss_type
    weights = keys.dpo_loss_weights
    if not losses or len(set(losses)) != len(losses):
        problems.add("dpo_loss_type", f"expected at least one loss, each listed only once, got {list(losses)}")
    matching = [name for name, loss in losses_of(args).items() if loss.needs_step_baselines]
    if len(matching) > 1:
        problems.add(
            "dpo_loss_type",
            f"{' and '.join(matching)} cannot be combined, since each matches the pairs of a step in its own way; keep "
            "one",
        )
    if {"sft", "orpo"} <= set(losses):
        problems.add(
            "dpo_loss_type",
            "orpo already includes the negative log-likelihood of the chosen answer, which sft would add again; remove "
            "sft",
        )
    if weights is not None and len(weights) != len(losses):
        problems.add(
            "dpo_loss_weights",
            f"expected one weight for each of the {len(losses)} losses in dpo_loss_type "
            f"({args.origin('dpo_loss_type')}), got {len(weights)} weights",
        )
    if "exo_pair" in losses and keys.dpo_label_smoothing == 0.0:
        problems.add(
            "dpo_label_smoothing",
            "the loss exo_pair needs the logarithm of dpo_label_smoothing, which is 0; set it above 0, say 0.001",
        )
