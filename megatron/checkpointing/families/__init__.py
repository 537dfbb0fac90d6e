"""HuggingFace's model families (LLaMA, Qwen, OLMo, Gemma, ...): their tensor names and their config.json,
both ways.

A new family is a `Family` (see `family.py`) in a file here, an entry in `registry.FAMILIES`, and a line in
tests/checkpointing/family_models.py, whose tests compare logits with transformers. `convert.py` translates
between a family and our configuration and tensors; `canonical_config.py` compares two configurations by what
they compute.
"""
