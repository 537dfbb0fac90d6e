"""Declares the training of reward models: its keys, and which runs use it."""

from megatron.methods.reward.keys import RewardModelKeys
from megatron.neox_arguments.keys.losses import TrainImpl
from megatron.neox_arguments.methods import MethodDeclaration

METHOD = MethodDeclaration(
    trains=lambda args: args.train_impl == "rm",
    impl=TrainImpl("rm", "pairs", options=("center_rewards_coefficient", "z_loss", "prefix_sharing")),
    keys=RewardModelKeys,
    is_planned=True,
)
