"""Tests of losses."""

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.language_modelling.declaration",
    "megatron.methods.language_modelling.method",
    "megatron.methods.preferences.declaration",
    "megatron.methods.preferences.method",
    "megatron.methods.online_preferences.declaration",
    "megatron.methods.online_preferences.method",
    "megatron.methods.kto.declaration",
    "megatron.methods.kto.method",
    "megatron.methods.reward.declaration",
    "megatron.methods.reward.method",
    "megatron.methods.reinforcement.declaration",
    "megatron.methods.reinforcement.method",
    "megatron.methods.unlearning.declaration",
    "megatron.methods.unlearning.method",
    "megatron.methods.distillation.declaration",
    "megatron.methods.distillation.method",
)
