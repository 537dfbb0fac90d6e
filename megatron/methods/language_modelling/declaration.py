"""Tells configuration of next-token prediction."""

from megatron.neox_arguments.methods import MethodDeclaration

METHOD = MethodDeclaration(lambda args: args.train_impl == "normal")
