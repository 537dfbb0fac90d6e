"""The kinds of training, one folder each, listed in `neox_arguments/methods.py`.

Each has a class `Method` in `method.py`, which `megatron.training.method` describes.
"""
