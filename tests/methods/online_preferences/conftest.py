"""Tests of preference training on pairs that the model writes."""

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.online_preferences.declaration",
    "megatron.methods.online_preferences.method",
    "megatron.methods.preferences.declaration",
    "megatron.methods.preferences.checks",
    "megatron.methods.reinforcement.checks",
)
