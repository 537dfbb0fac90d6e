"""Trains reward models, which score answers, on pairs of a chosen and a rejected answer."""

from megatron.methods.reward.keys import RewardModelKeys
from megatron.methods.reward.objective import reward
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.training import method


class Method(method.Method):
    """Learns to score the chosen answer of a pair above the rejected one."""

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of reward models."""
        return reward(RewardModelKeys.read_from(args).center_rewards_coefficient or 0.0, args.z_loss)
