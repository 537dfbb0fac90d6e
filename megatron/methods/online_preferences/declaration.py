"""Tells configuration and data of preference training on answers that the model writes."""

from dataclasses import replace

from megatron.methods.preferences.declaration import METHOD as PREFERENCES
from megatron.methods.reinforcement.declaration import METHOD as REINFORCEMENT
from megatron.neox_arguments.methods import MethodDeclaration

METHOD: MethodDeclaration = replace(  # prompts, answers and their order are those of reinforcement learning
    REINFORCEMENT,
    trains=lambda args: args.train_impl == "dpo" and args.dataset_impl == "online",
    impl=None,
    keys=None,
    needs_reference=PREFERENCES.needs_reference,
    loss_temperature=lambda args: None,
)
