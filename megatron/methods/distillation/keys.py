"""Declares the configuration keys of distillation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.neox_arguments.keys.declaration import REQUIRED, key, new_key
from megatron.neox_arguments.methods import MethodKeys


@dataclass(frozen=True)
class Distillation:
    """The sub-keys of `distillation`, with the names of TRL's GKD trainer where it has them."""

    teacher: str = key(
        REQUIRED,
        "The teacher model: a checkpoint folder, saved with any parallel layout, or a HuggingFace model (a folder, or "
        "hf://ORG/NAME). Must have the student's tokenizer",
    )
    beta: float = key(
        0.0,
        "Which divergence is the loss of each trained token. 0: KL(teacher || student); 1: KL(student || teacher); "
        "between: generalised Jensen-Shannon divergence",
        ge=0,
        le=1,
    )
    temperature: float = key(
        1.0,
        "Divides the logits of teacher and student. As in TRL, the divergence is not multiplied by the square of the "
        "temperature",
        gt=0,
    )
    weight: float = key(
        1.0,
        "Loss of a token: weight x divergence + (1 - weight) x negative log-likelihood of the label",
        gt=0,
        le=1,
    )
    top_k: int | None = key(
        None,
        "Compute the divergence on the teacher's top_k most likely tokens, with all other tokens together as one more "
        "outcome; unset: on the full vocabulary",
        ge=1,
    )
    cache: bool = key(
        False,
        "Run the teacher on all training rows before the first step, save its top_k tokens on disk, and unload it. "
        "Later runs with the same teacher reuse them. Needs top_k",
    )
    lmbda: float = key(
        0.0,
        "Share of on-policy steps (GKD). In these the student answers the step's prompts, sampling at "
        "distillation.temperature, and the loss is the divergence on its answers. Needs train_label_data_paths and "
        "pack_impl: unpacked",
        ge=0,
        le=1,
    )
    max_new_tokens: int = key(
        128, "Maximum tokens of an answer that the student writes in an on-policy step (lmbda)", ge=1
    )
    cache_dir: str | None = key(
        None,
        "Folder for the cache of teacher scores (cache: true), which several runs may share; unset: teacher_cache next "
        "to the dataset's index maps",
    )


@dataclass(frozen=True)
class DistillationKeys(MethodKeys):
    """Distillation: learn another model's distributions."""

    distillation: Mapping[str, Any] | None = new_key(
        None,
        "Train the model to match a teacher model's next-token distributions; needs train_impl: normal",
        section=Distillation,
    )


def distillation_keys(args: object) -> Mapping[str, Any]:
    """Returns the sub-keys of `distillation`. The run must have that key."""
    distillation = DistillationKeys.read_from(args).distillation
    assert distillation is not None
    return distillation
