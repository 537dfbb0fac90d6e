"""Declares the keys and losses of KTO, and which data it needs."""

from typing import Any, Literal

from megatron.methods.kto.keys import LOSSES, KTOKeys
from megatron.neox_arguments.keys.losses import TrainImpl
from megatron.neox_arguments.methods import MethodDeclaration


def _mismatched_answers(args: Any) -> Literal["drawn", "rotated"] | None:
    keys = KTOKeys.read_from(args)
    has_kl = LOSSES[keys.kto_loss_type].needs_step_baselines and not keys.compat_kto
    return keys.kto_kl if has_kl else None


def _splits_micro_batches(args: Any) -> bool:
    keys = KTOKeys.read_from(args)
    return not keys.compat_kto and _mismatched_answers(args) != "rotated"


def _sample_keys(args: Any) -> list[str]:
    keys = KTOKeys.read_from(args)
    return [keys.kto_loss_type, keys.kto_kl, str(keys.compat_kto)]


METHOD = MethodDeclaration(
    trains=lambda args: args.train_impl == "kto",
    impl=TrainImpl("kto", "answers", "kto_loss_type", LOSSES),
    keys=KTOKeys,
    mismatched_answers=_mismatched_answers,
    splits_micro_batches=_splits_micro_batches,
    sample_keys=_sample_keys,
    finetuned_rows="judged",
)
