"""Online preference training: the model writes answers, and a judge or rewards choose the better of two."""

from megatron.methods.preferences.method import pair_objective
from megatron.methods.reinforcement.method import OnlineMethod
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective


class Method(OnlineMethod):
    """Learns to prefer the better of two answers that the model has written."""

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of preference pairs, as for pairs from files."""
        return pair_objective(args)

    def untrained_reason(self) -> str:
        """Returns why a step may have no trained token, for the log."""
        return "no prompt has a better and a worse answer, see the rewards in rollouts.jsonl"
