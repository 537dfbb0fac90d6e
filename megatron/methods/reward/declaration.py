"""Tells configuration of reward models."""

from megatron.neox_arguments.methods import MethodDeclaration

METHOD = MethodDeclaration(lambda args: args.train_impl == "rm")
