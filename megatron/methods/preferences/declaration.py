"""Tells configuration of preference training."""

from megatron.neox_arguments.methods import MethodDeclaration

METHOD = MethodDeclaration(lambda args: args.train_impl == "dpo")
