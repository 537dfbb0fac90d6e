"""HuggingFace's model families: tables of their tensor names and translations of config.json, both ways.

A new family is a `Family` in a file here, its place in `convert.FAMILIES`, and a line in the parity test.
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

__all__ = [
    "FAMILIES",
    "check_hf_tensors",
    "family_of",
    "from_hf",
    "hf_config",
    "hf_shapes",
    "canonical_config",
    "to_hf",
    "with_fields",
]
