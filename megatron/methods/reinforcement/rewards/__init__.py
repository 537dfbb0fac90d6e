"""Rewards: functions of the user and verifiers of ours judge completions, in processes beside the ranks.

`worker.py` is what those processes run, so this package imports nothing before it is asked for, and torch
never.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.methods.reinforcement.rewards.functions import RewardError, RewardFunctions
    from megatron.methods.reinforcement.rewards.scores import Completion, Failure, Scores

_MODULES = {
    "Completion": "scores",
    "Failure": "scores",
    "RewardError": "functions",
    "RewardFunctions": "functions",
    "Scores": "scores",
}
__all__ = ["Completion", "Failure", "RewardError", "RewardFunctions", "Scores"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
