"""A trainer for large language models with tensor, pipeline, sequence and data parallelism.

Reads GPT-NeoX configurations, data and checkpoints. Each sub-package is one room and says in its
own docstring what it is for; imports point from higher rooms to lower ones only.
"""
