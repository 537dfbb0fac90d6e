"""Describes HuggingFace's model families (LLaMA, Qwen, OLMo, Gemma, ...) and converts their models to ours
and back.

Each family has its tensor names and the translation of its config.json in a file of this folder. A new family
is a `Family` (see `family.py`) in such a file, an entry in `registry.FAMILIES`, and a line in
tests/checkpointing/family_models.py, whose tests compare logits with transformers. `convert.py` converts
configuration and tensors; `canonical_config.py` compares two configurations by what they compute.
"""
