"""KTO: answers that are judged desirable or undesirable."""

from megatron.neox_arguments import NeoXArgs
from megatron.objectives import KtoSettings, Objective, kto
from megatron.training import method


class Method(method.Method):
    """Learns from single answers, each with a judgement."""

    def objective(self, args: NeoXArgs) -> Objective:
        """See `Method`."""
        weights = args.kto_desirable_weight, args.kto_undesirable_weight
        return kto(KtoSettings(args.kto_beta, *weights, args.kto_loss_type, neox=args.compat_kto), args.softmax_rows)
