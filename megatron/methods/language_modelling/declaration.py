"""Declares next-token prediction: its losses by name, and which runs use it."""

from megatron.neox_arguments.keys.losses import Loss, TrainImpl
from megatron.neox_arguments.methods import MethodDeclaration

LOSSES = {
    "nll": Loss("objectives.language_modelling.nll", ("z_loss",)),
    "dft": Loss("objectives.language_modelling.dft"),
}  # each function maps log-probabilities of tokens to their losses (`mpu.TokenLoss`)

METHOD = MethodDeclaration(
    trains=lambda args: args.train_impl == "normal",
    impl=TrainImpl("normal", "texts", "sft_loss_type", LOSSES),
    is_planned=True,
)
