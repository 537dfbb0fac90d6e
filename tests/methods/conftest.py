"""Tests of kinds of training."""

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = ("megatron.methods.language_modelling.declaration", "megatron.methods.language_modelling.method")
