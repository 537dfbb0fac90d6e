"""Declares online preference training, on answers that the model writes: which runs use it, and its data."""

from dataclasses import replace

from megatron.methods.preferences.declaration import METHOD as PREFERENCES
from megatron.methods.reinforcement.declaration import METHOD as REINFORCEMENT
from megatron.neox_arguments.methods import MethodDeclaration

METHOD: MethodDeclaration = replace(  # prompts and sampling are the same as in reinforcement learning
    REINFORCEMENT,
    trains=lambda args: args.train_impl == "dpo" and args.dataset_impl == "online",
    impl=None,
    keys=None,
    needs_reference=PREFERENCES.needs_reference,
    loss_temperature=lambda args: None,
)
