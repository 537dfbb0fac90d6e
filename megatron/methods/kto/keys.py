"""Declares the configuration keys of KTO, and its losses by name."""

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
}  # the functions are of type `objective.ResponseLoss`
AnswerLoss: TypeAlias = Literal[tuple(LOSSES)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class KTOKeys(MethodKeys):
    """KTO: the loss of a judged answer, and its parameters."""

    kto_loss_type: AnswerLoss = new_key(
        "kto",
        "Loss of an answer that is judged desirable or undesirable, in TRL's spelling; apo_zero_unpaired is kto "
        "without the KL",
    )
    kto_kl: Literal["drawn", "rotated"] = new_key(
        "drawn",
        "How prompts are paired with answers to other prompts, to estimate the KL. drawn: answers from the whole "
        "dataset; rotated: the answer of the previous example in the micro-batch (TRL), needs pack_impl: unpacked",
    )
    kto_beta: float = key(
        0.1,
        "KTO: beta, the factor of the log-ratio of policy to reference; larger values keep the model closer to the "
        "reference",
        gt=0,
        differs="GPT-NeoX takes the KL from the other half of the micro-batch, averages class weights over each half, "
        "and multiplies rewards by the unpadded share of the row; set compat_kto to do the same",
    )
    compat_kto: bool = new_key(
        False,
        "KTO as GPT-NeoX computes it: the KL of each half of a micro-batch comes from the other half, and weights are "
        "averaged over a half. Needs pack_impl: unpacked",
    )
    kto_fp32: bool = key(True, "KTO: compute losses in fp32", no_effect=LOSSES_IN_FP32)
    kto_desirable_weight: float = key(1.0, "KTO: weight of the loss of desirable answers", gt=0)
    kto_undesirable_weight: float = key(1.0, "KTO: weight of the loss of undesirable answers", gt=0)
