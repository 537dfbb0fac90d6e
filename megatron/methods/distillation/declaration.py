"""Declares the keys of distillation, and which runs use it."""

from megatron.methods.distillation.keys import DistillationKeys
from megatron.neox_arguments.methods import MethodDeclaration

METHOD = MethodDeclaration(
    lambda args: args.train_impl == "normal" and DistillationKeys.read_from(args).distillation is not None,
    DistillationKeys,
    has_second_model=True,
)
