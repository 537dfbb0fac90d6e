"""Declares the configuration keys of preference training, and its losses by name."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import LOSSES_IN_FP32, key, new_key
from megatron.neox_arguments.keys.losses import Loss
from megatron.neox_arguments.methods import MethodKeys

_SMOOTHED = ("dpo_label_smoothing",)
# Each function is a `pair_losses.PairLoss`. A loss with `needs_step_baselines` also needs an entry in
# `MATCHINGS`; a loss with a likelihood part needs an entry in `NLL_WEIGHTS`. Both are in `objective.py`.
LOSSES = {
    "sigmoid": Loss("methods.preferences.pair_losses.sigmoid", _SMOOTHED, needs_reference=True),
    "hinge": Loss("methods.preferences.pair_losses.hinge", needs_reference=True),
    "ipo": Loss("methods.preferences.pair_losses.ipo", needs_reference=True),
    "exo_pair": Loss("methods.preferences.pair_losses.exo_pair", _SMOOTHED, needs_reference=True),
    "nca_pair": Loss("methods.preferences.pair_losses.nca_pair", needs_reference=True),
    "robust": Loss("methods.preferences.pair_losses.robust", _SMOOTHED, needs_reference=True),
    "bco_pair": Loss("methods.preferences.pair_losses.bco_pair", needs_reference=True),
    "sppo_hard": Loss("methods.preferences.pair_losses.sppo_hard", needs_reference=True),
    "aot": Loss("methods.preferences.pair_losses.aot", _SMOOTHED, needs_reference=True, needs_step_baselines=True),
    "aot_unpaired": Loss(
        "methods.preferences.pair_losses.aot_unpaired",
        _SMOOTHED,
        needs_reference=True,
        needs_step_baselines=True,
    ),
    "apo_zero": Loss("methods.preferences.pair_losses.apo_zero", needs_reference=True),
    "apo_down": Loss("methods.preferences.pair_losses.apo_down", needs_reference=True),
    "discopop": Loss("methods.preferences.pair_losses.discopop", ("discopop_tau",), needs_reference=True),
    "sft": Loss("methods.preferences.pair_losses.sft"),
    "sigmoid_norm": Loss("methods.preferences.pair_losses.sigmoid_norm", _SMOOTHED, needs_reference=True),
    "simpo": Loss("methods.preferences.pair_losses.simpo", (*_SMOOTHED, "simpo_gamma")),
    "orpo": Loss("methods.preferences.pair_losses.orpo"),
}
PairLoss: TypeAlias = Literal[tuple(LOSSES)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class PreferencesKeys(MethodKeys):
    """Preference training: losses of pairs, and their parameters."""

    dpo_loss_type: PairLoss | tuple[PairLoss, ...] = new_key(
        "sigmoid",
        "Loss of a pair, or a list of losses to add, in TRL's spelling. DPO: sigmoid. DPO on per-token averages (OLMo "
        "3, Tulu 3): sigmoid_norm. Negative log-likelihood of the chosen answer: sft. CPO: [sigmoid, sft] with "
        "dpo_reference_free. No reference model is needed by simpo and orpo. All pairs of an optimizer step are "
        "compared by aot and aot_unpaired; TRL compares those of a micro-batch",
    )
    dpo_loss_weights: tuple[float, ...] | None = new_key(
        None, "Weight of each loss in dpo_loss_type, in the same order; unset: 1 each"
    )
    dpo_label_smoothing: float = new_key(
        0.0,
        "Assumed share of pairs whose chosen and rejected answers are swapped by mistake. Used by the losses sigmoid "
        "(conservative DPO; TRL ignores it there), sigmoid_norm, robust, exo_pair (must be above 0), aot, aot_unpaired "
        "and simpo",
        ge=0,
        lt=0.5,
    )
    discopop_tau: float = new_key(
        0.05,
        "For dpo_loss_type: discopop, the temperature of the switch between its logistic and exponential losses; "
        "smaller is sharper",
        gt=0,
    )
    simpo_gamma: float = new_key(
        0.5, "For dpo_loss_type: simpo, the margin by which the chosen answer's reward should be larger", ge=0
    )
    dpo_beta: float = key(
        0.1,
        "DPO: beta, the factor of the log-ratio of policy to reference; larger values keep the model closer to the "
        "reference. Common: 0.1 for losses of summed log-probabilities, 5 for sigmoid_norm, 2 for simpo",
        gt=0,
    )
    dpo_fp32: bool = key(True, "DPO: compute losses in fp32", no_effect=LOSSES_IN_FP32)
    dpo_reference_free: bool = key(
        False, "DPO without a reference model, as if the reference gave all answers the same probability"
    )
