"""The keys of preference training, and the losses that they name."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import LOSSES_IN_FP32, key, new_key
from megatron.neox_arguments.keys.losses import Loss
from megatron.neox_arguments.methods import MethodKeys

_SMOOTHED = ("dpo_label_smoothing",)
# Of a pair of responses: `pair_losses.PairLoss`. A loss with `needs_step_baselines` also has an entry of
# `MATCHINGS`, a loss with a likelihood part one of `NLL_WEIGHTS`, both in `objective.py`.
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
        "Loss of a pair, or a list of losses, in TRL's spelling. sigmoid_norm: on averages over tokens (OLMo 3, "
        "Tulu 3); sft: likelihood of the chosen answer; [sigmoid, sft] with dpo_reference_free: CPO. simpo and "
        "orpo need no reference. aot and aot_unpaired compare all pairs of a step, TRL's those of a micro-batch",
    )
    dpo_loss_weights: tuple[float, ...] | None = new_key(None, "Weight of each loss of dpo_loss_type; unset: 1")
    dpo_label_smoothing: float = new_key(
        0.0,
        "Assumed share of mislabelled pairs, in sigmoid (conservative DPO; TRL ignores it there), sigmoid_norm, "
        "robust, exo_pair (needs it), aot, aot_unpaired and simpo",
        ge=0,
        lt=0.5,
    )
    discopop_tau: float = new_key(0.05, "dpo_loss_type: discopop: width of its switch", gt=0)
    simpo_gamma: float = new_key(0.5, "dpo_loss_type: simpo: margin of the rewards", ge=0)
    dpo_beta: float = key(
        0.1,
        "DPO: strength of the reference. Common: 0.1 for summed log-probabilities, 5 for sigmoid_norm, 2 for simpo",
        gt=0,
    )
    dpo_fp32: bool = key(True, "DPO: losses in fp32", no_effect=LOSSES_IN_FP32)
    dpo_reference_free: bool = key(
        False, "DPO without a reference model, as if it gave all answers the same probability"
    )
