"""Checks of the keys of preference training."""

from megatron.methods.preferences.keys import PreferencesKeys
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import losses_of


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Note problems with the keys of preference training."""
    if args.train_impl != "dpo":
        return
    keys = PreferencesKeys.read_from(args)
    losses = (keys.dpo_loss_type,) if isinstance(keys.dpo_loss_type, str) else keys.dpo_loss_type
    weights = keys.dpo_loss_weights
    if not losses or len(set(losses)) != len(losses):
        problems.add("dpo_loss_type", f"expected at least one loss, each once, got {list(losses)}")
    matching = [name for name, loss in losses_of(args).items() if loss.needs_step_baselines]
    if len(matching) > 1:
        problems.add("dpo_loss_type", f"{' and '.join(matching)} match pairs differently; take one of them")
    if {"sft", "orpo"} <= set(losses):
        problems.add("dpo_loss_type", "orpo already includes the likelihood of the chosen answer; remove sft")
    if weights is not None and len(weights) != len(losses):
        problems.add(
            "dpo_loss_weights",
            f"expected a weight for each of {len(losses)} losses of dpo_loss_type ({args.origin('dpo_loss_type')}), "
            f"got {len(weights)}",
        )
    if "exo_pair" in losses and keys.dpo_label_smoothing == 0.0:
        problems.add("dpo_label_smoothing", "exo_pair takes its logarithm; set it above 0, say 0.001")
