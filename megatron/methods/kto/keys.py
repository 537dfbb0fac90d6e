"""The keys of KTO, and the losses that they name."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import LOSSES_IN_FP32, key, new_key
from megatron.neox_arguments.keys.losses import Loss
from megatron.neox_arguments.methods import MethodKeys

LOSSES = {
    "kto": Loss(
        "methods.kto.objective.prospect", ("compat_kto", "kto_kl"), needs_reference=True, needs_step_baselines=True
    ),
    "apo_zero_unpaired": Loss("methods.kto.objective.prospect", needs_reference=True),
}  # of a judged response: `objective.ResponseLoss`
AnswerLoss: TypeAlias = Literal[tuple(LOSSES)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class KTOKeys(MethodKeys):
    """KTO: the loss of a judged answer, and its parameters."""

    kto_loss_type: AnswerLoss = new_key(
        "kto", "Loss of a judged answer, in TRL's spelling; apo_zero_unpaired has no KL"
    )
    kto_kl: Literal["drawn", "rotated"] = new_key(
        "drawn",
        "Answers to other prompts, for the KL. drawn: from the whole set; rotated: the example before in the "
        "micro-batch (TRL), with pack_impl: unpacked",
    )
    kto_beta: float = key(
        0.1,
        "KTO: strength of the reference",
        gt=0,
        differs="GPT-NeoX takes the KL from the other half of the micro-batch, averages class weights over a half, and "
        "multiplies rewards by the unpadded share of the row: compat_kto",
    )
    compat_kto: bool = new_key(False, "KTO with GPT-NeoX's KL and averages, one answer per row (pack_impl: unpacked)")
    kto_fp32: bool = key(True, "KTO: losses in fp32", no_effect=LOSSES_IN_FP32)
    kto_desirable_weight: float = key(1.0, "KTO: weight of good answers", gt=0)
    kto_undesirable_weight: float = key(1.0, "KTO: weight of bad answers", gt=0)
