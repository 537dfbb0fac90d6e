"""Tests of training on answers that the model writes."""

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.reinforcement.declaration",
    "megatron.methods.reinforcement.checks",
    "megatron.methods.reinforcement.method",
    "megatron.methods.online_preferences.declaration",
    "megatron.methods.online_preferences.method",
)
