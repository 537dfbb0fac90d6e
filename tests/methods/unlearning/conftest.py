"""Tests of unlearning."""

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.unlearning.declaration",
    "megatron.methods.unlearning.checks",
    "megatron.methods.unlearning.method",
)
