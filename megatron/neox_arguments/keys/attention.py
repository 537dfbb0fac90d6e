"""The table of attention backends: values of `attention_backend` and what runs for them, in order of
preference.

A new backend is an entry here and a class in megatron/model/attention. Every run imports the files named
here, so a package that may be missing is imported where it is used.
"""

from typing import Literal, TypeAlias

# (name, class: FILE.NAME of megatron/model/attention)
ATTENTION_BACKENDS = (
    ("flash", "backends.Varlen"),
    ("efficient", "backends.EfficientVarlen"),
    ("cudnn", "backends.Cudnn"),
    ("flash", "backends.Flash"),
    ("efficient", "backends.Efficient"),
    ("math", "backends.Math"),
)
AttentionBackendName: TypeAlias = Literal["auto", *dict(ATTENTION_BACKENDS)]  # type: ignore[valid-type]
