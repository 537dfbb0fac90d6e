"""Preference training on pairs of answers that the model writes and a judge or rewards compare."""

from megatron.methods.preferences.method import pair_objective
from megatron.methods.reinforcement.method import OnlineMethod
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective


class Method(OnlineMethod):
    """Learns to prefer the better of two answers that the model has written."""

    def objective(self, args: NeoXArgs) -> Objective:
        """See `Method`."""
        return pair_objective(args)

    def untrained_reason(self) -> str:
        """See `Method`."""
        return "no prompt gave a pair, see rollouts.jsonl"
