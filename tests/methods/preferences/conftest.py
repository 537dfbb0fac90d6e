"""Tests of preference training."""

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.preferences.declaration",
    "megatron.methods.preferences.checks",
    "megatron.methods.preferences.method",
    "megatron.methods.kto.declaration",
    "megatron.methods.kto.checks",
    "megatron.methods.kto.method",
)
