"""Declares preference training: its keys and losses, and which runs use it."""

from typing import Any

from megatron.methods.preferences.keys import LOSSES, PreferencesKeys
from megatron.methods.reinforcement.keys import REWARD_OPTIONS
from megatron.neox_arguments.keys.losses import TrainImpl
from megatron.neox_arguments.methods import MethodDeclaration


def _needs_reference(args: Any) -> bool | None:
    return False if PreferencesKeys.read_from(args).dpo_reference_free else None


METHOD = MethodDeclaration(
    trains=lambda args: args.train_impl == "dpo",
    impl=TrainImpl(
        "dpo", "pairs", "dpo_loss_type", LOSSES, ("dpo_loss_weights", "dpo_reference_free", "prefix_sharing"),
        online=REWARD_OPTIONS,
    ),
    keys=PreferencesKeys,
    needs_reference=_needs_reference,
    is_planned=True,
    finetuned_rows="pairs",
)  # fmt: skip
