"""Keys that say which parameters train, and what fine-tuning adds to the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.neox_arguments.keys.declaration import new_key
from megatron.neox_arguments.keys.sections import Lora, Trainable


@dataclass(frozen=True)
class AdapterKeys:
    """Fine-tuning: which parameters train, LoRA adapters, noise on embeddings, dropout turned off."""

    trainable: Mapping[str, Any] | None = new_key(
        None, "Parameters to train; all others stay fixed; unset: all", section=Trainable
    )
    lora: Mapping[str, Any] | None = new_key(
        None,
        "Train low-rank adapters and nothing else; the reference of preferences is the model without them",
        section=Lora,
    )
    neftune_noise_alpha: float | None = new_key(
        None,
        "train_impl normal: add uniform noise to the embeddings in training, up to this / sqrt(tokens of the "
        "document x hidden_size), as NEFTune; 5 to 15 are common",
        ge=0,
    )
    disable_dropout: bool | None = new_key(
        None,
        "Train without hidden_dropout, attention_dropout and lora.dropout; unset: true except with train_impl normal",
    )
