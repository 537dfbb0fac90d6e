"""The objective that a configuration asks for."""

from __future__ import annotations

from megatron.neox_arguments import NeoXArgs
from megatron.objectives.dpo import dpo
from megatron.objectives.kto import KtoSettings, kto
from megatron.objectives.language_modelling import language_modelling
from megatron.objectives.objective import Objective
from megatron.objectives.pair_losses import PairSettings


def build_objective(args: NeoXArgs) -> Objective:
    """By `train_impl`."""
    if args.train_impl == "dpo":
        losses: tuple[str, ...] = (args.dpo_loss_type,) if isinstance(args.dpo_loss_type, str) else args.dpo_loss_type
        weights: dict[str, float] = dict(zip(losses, args.dpo_loss_weights or [1.0] * len(losses), strict=True))
        settings = PairSettings(args.dpo_beta, args.dpo_label_smoothing, args.discopop_tau, args.simpo_gamma)
        return dpo(weights, settings, reference_free=args.dpo_reference_free, columns=args.softmax_rows)
    if args.train_impl == "kto":
        return kto(
            KtoSettings(
                args.kto_beta, args.kto_desirable_weight, args.kto_undesirable_weight, args.kto_loss_type,
                neox=args.compat_kto,
            ),
            args.softmax_rows,
        )  # fmt: skip
    labelled = args.train_label_data_paths is not None
    dft = args.sft_loss_type == "dft"
    return language_modelling(args.z_loss, dft=dft, statistics=labelled, columns=args.softmax_rows)
