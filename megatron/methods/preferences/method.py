"""Preference training (DPO and related losses) on pairs of answers from the data."""

from megatron.methods.preferences.keys import PreferencesKeys
from megatron.methods.preferences.objective import dpo
from megatron.methods.preferences.pair_losses import PairSettings
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import losses_of, writes_pairs
from megatron.objectives import Objective
from megatron.training import method


def pair_objective(args: NeoXArgs) -> Objective:
    """Returns the loss and metrics of preference pairs: the weighted sum of the losses in `dpo_loss_type`."""
    keys = PreferencesKeys.read_from(args)
    losses = losses_of(args)
    weights: dict[str, float] = dict(zip(losses, keys.dpo_loss_weights or [1.0] * len(losses), strict=True))
    settings = PairSettings(keys.dpo_beta, keys.dpo_label_smoothing, keys.discopop_tau, keys.simpo_gamma)
    return dpo(
        weights, settings, reference_free=keys.dpo_reference_free, columns=args.softmax_rows, sampled=writes_pairs(args)
    )


class Method(method.Method):
    """Learns to prefer the chosen answer of a pair to the rejected one."""

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of preference pairs."""
        return pair_objective(args)
