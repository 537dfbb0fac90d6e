"""Lists the attention backends in order of preference: values of `attention_backend` and the class of each.

To add a backend, add an entry here and a class in megatron/model/attention. Every run imports the files named
here, so such a file must import optional packages only where it uses them.
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
