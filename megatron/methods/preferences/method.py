"""Preference training on pairs of answers of the data: DPO and its relatives."""

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import losses_of, writes_pairs
from megatron.objectives import Objective, PairSettings, dpo
from megatron.training import method


def pair_objective(args: NeoXArgs) -> Objective:
    """Returns the weighted sum of the run's losses of pairs."""
    losses = losses_of(args)
    weights: dict[str, float] = dict(zip(losses, args.dpo_loss_weights or [1.0] * len(losses), strict=True))
    settings = PairSettings(args.dpo_beta, args.dpo_label_smoothing, args.discopop_tau, args.simpo_gamma)
    return dpo(
        weights, settings, reference_free=args.dpo_reference_free, columns=args.softmax_rows, sampled=writes_pairs(args)
    )


class Method(method.Method):
    """Learns to prefer the chosen answer of a pair to the rejected one."""

    def objective(self, args: NeoXArgs) -> Objective:
        """See `Method`."""
        return pair_objective(args)
