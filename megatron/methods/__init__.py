"""The kinds of training, one folder each, listed in `neox_arguments/methods.py`.

Each folder has a file `method.py` with a class `Method`, a subclass of `megatron.training.method.Method`.
"""
