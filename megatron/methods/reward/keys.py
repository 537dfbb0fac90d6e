"""The keys of reward models."""

from dataclasses import dataclass

from megatron.neox_arguments.keys.declaration import new_key
from megatron.neox_arguments.methods import MethodKeys


@dataclass(frozen=True)
class RewardModelKeys(MethodKeys):
    """Reward models: the loss of a pair of scores."""

    center_rewards_coefficient: float | None = new_key(
        None,
        "train_impl rm: weight of the squared sum of a pair's scores, to keep scores around 0, as TRL's; 0.01 is "
        "common",
        gt=0,
    )
