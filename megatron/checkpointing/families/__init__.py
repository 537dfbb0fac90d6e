"""HuggingFace's model families (LLaMA, Qwen, OLMo, Gemma, ...): their tensor names and their config.json,
both ways.

A new family is a `Family` (see `family.py`) in a file here, an entry in `convert.FAMILIES`, and a line in
tests/checkpointing/family_models.py, whose tests compare logits with transformers. `convert.py` translates
between a family and our configuration and tensors; `canonical_config.py` compares two configurations by what
they compute.
"""

from megatron.checkpointing.families.canonical_config import canonical_config
from megatron.checkpointing.families.convert import (
    FAMILIES,
    check_hf_tensors,
    family_of,
    from_hf,
    hf_config,
    hf_shapes,
    to_hf,
    with_fields,
)
from megatron.checkpointing.families.family import gives_score

__all__ = [
    "FAMILIES",
    "check_hf_tensors",
    "family_of",
    "from_hf",
    "gives_score",
    "hf_config",
    "hf_shapes",
    "canonical_config",
    "to_hf",
    "with_fields",
]
