"""HuggingFace's model families (LLaMA, Qwen, OLMo, Gemma, ...): their tensor names and their config.json,
both ways.

A new family is a `Family` (see `family.py`) in a file here, an entry in `registry.FAMILIES`, and a line in
tests/checkpointing/family_models.py, whose tests compare logits with transformers. `convert.py` translates
between a family and our configuration and tensors; `canonical_config.py` compares two configurations by what
they compute.
"""

from megatron.checkpointing.families.canonical_config import canonical_config
from megatron.checkpointing.families.convert import (
    check_hf_tensors,
    from_hf,
    hf_config,
    hf_names,
    hf_shapes,
    is_of_family,
    is_same_model,
    lacks_prefix,
    to_hf,
    unchanged_family,
    with_fields,
)
from megatron.checkpointing.families.experts import ExpertRows, rows_of_experts
from megatron.checkpointing.families.family import gives_score
from megatron.checkpointing.families.field_types import check_adapter_fields, check_fields, plain_values
from megatron.checkpointing.families.multimodal import (
    TEXT_TOWERS,
    is_multimodal,
    memory_name,
    multimodal_config,
    names_a_wrapper,
    stored_name,
    text_config,
    text_modules,
    text_name,
    text_names,
    with_vocab_size,
)
from megatron.checkpointing.families.registry import FAMILIES, family_of

__all__ = [
    "FAMILIES",
    "TEXT_TOWERS",
    "ExpertRows",
    "check_adapter_fields",
    "check_fields",
    "check_hf_tensors",
    "unchanged_family",
    "family_of",
    "from_hf",
    "gives_score",
    "hf_config",
    "hf_names",
    "hf_shapes",
    "is_multimodal",
    "is_of_family",
    "memory_name",
    "names_a_wrapper",
    "text_modules",
    "is_same_model",
    "lacks_prefix",
    "canonical_config",
    "rows_of_experts",
    "stored_name",
    "text_config",
    "text_name",
    "text_names",
    "to_hf",
    "plain_values",
    "multimodal_config",
    "with_fields",
    "with_vocab_size",
]
