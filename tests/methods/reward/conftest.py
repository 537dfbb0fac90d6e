"""Tests of reward models."""

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.reward.declaration",
    "megatron.methods.reward.checks",
    "megatron.methods.reward.method",
)
