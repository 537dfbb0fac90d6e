"""The table of attention backends: values of `attention_backend` and what runs for them, in order of
preference.

A new backend is an entry here and a class in megatron/model/attention. Every run imports the files named
here, so a package that may be missing is imported where it is used.
"""

from typing import Literal, TypeAlias

# (name, class: FILE.NAME of megatron/model/attention)
ATTENTION_BACKENDS = (
    ("flash", "backends.Varlen"),
    ("flex", "flex.Flex"),
    ("efficient", "backends.EfficientVarlen"),
    ("cudnn", "backends.Cudnn"),
    ("flash", "backends.Flash"),
    ("efficient", "backends.Efficient"),
    ("flash3", "registered.Flash3Varlen"),
    ("flash3", "registered.Flash3"),
    ("flash4", "registered.Flash4Varlen"),
    ("flash4", "registered.Flash4"),
    ("flash_attn", "packages.FlashAttn"),
    ("transformer_engine", "packages.TransformerEngineAttention"),
    ("math", "backends.Math"),
)
AttentionBackendName: TypeAlias = Literal["auto", *dict(ATTENTION_BACKENDS)]  # type: ignore[valid-type]
