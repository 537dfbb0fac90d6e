"""The keys of distillation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.neox_arguments.keys.declaration import REQUIRED, key, new_key
from megatron.neox_arguments.methods import MethodKeys


@dataclass(frozen=True)
class Distillation:
    """The sub-keys of `distillation`, by the names of TRL's GKD where it has them."""

    teacher: str = key(
        REQUIRED,
        "The teacher: a checkpoint of any layout with the same tokenizer, or a HuggingFace model (a folder, or "
        "hf://ORG/NAME)",
    )
    beta: float = key(
        0.0,
        "Divergence of each trained token. 0: KL(teacher || student); 1: KL(student || teacher); between: "
        "generalised Jensen-Shannon divergence",
        ge=0,
        le=1,
    )
    temperature: float = key(
        1.0, "Divides the logits of both models. As in TRL, the divergence is not multiplied by its square", gt=0
    )
    weight: float = key(
        1.0, "Weight of the divergence in the loss; 1 - weight goes to the labels' negative log-likelihood", gt=0, le=1
    )
    top_k: int | None = key(
        None, "Compare this many of the teacher's likeliest tokens, and all others as one outcome; unset: all", ge=1
    )
    cache: bool = key(
        False,
        "Run the teacher on all rows before the first step, then unload it. Its top_k tokens stay on disk, by "
        "teacher and content",
    )
    lmbda: float = key(
        0.0,
        "Share of on-policy steps (GKD): the student answers the step's prompts at the same temperature, and the "
        "loss is the divergence on these answers. Needs labels and pack_impl: unpacked",
        ge=0,
        le=1,
    )
    max_new_tokens: int = key(128, "lmbda: most tokens of an answer", ge=1)
    cache_dir: str | None = key(None, "cache: folder shared by all runs; unset: teacher_cache beside the index maps")


@dataclass(frozen=True)
class DistillationKeys(MethodKeys):
    """Distillation: learn another model's distributions."""

    distillation: Mapping[str, Any] | None = new_key(
        None, "train_impl normal: learn another model's distributions", section=Distillation
    )


def distillation_keys(args: object) -> Mapping[str, Any]:
    """Returns the sub-keys of `distillation` of a run that has them."""
    distillation = DistillationKeys.read_from(args).distillation
    assert distillation is not None
    return distillation
