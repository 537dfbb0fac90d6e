"""KTO: learns from single answers that are judged desirable or undesirable."""

from megatron.methods.kto.keys import KTOKeys
from megatron.methods.kto.objective import KtoSettings, kto
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.training import method


class Method(method.Method):
    """Learns from single answers, each judged desirable or undesirable."""

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of KTO."""
        keys = KTOKeys.read_from(args)
        weights = keys.kto_desirable_weight, keys.kto_undesirable_weight
        return kto(KtoSettings(keys.kto_beta, *weights, keys.kto_loss_type, neox=keys.compat_kto), args.softmax_rows)
