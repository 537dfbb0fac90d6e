"""Declares the configuration keys of reward models."""

from dataclasses import dataclass

from megatron.neox_arguments.keys.declaration import new_key
from megatron.neox_arguments.methods import MethodKeys


@dataclass(frozen=True)
class RewardModelKeys(MethodKeys):
    """Reward models: the loss of a pair of scores."""

    center_rewards_coefficient: float | None = new_key(
        None,
        "For train_impl: rm, the coefficient of (score of chosen + score of rejected)^2, which keeps scores around 0, "
        "as in TRL; 0.01 is common; unset: 0",
        gt=0,
    )
