"""Tells configuration of next-token prediction."""

from megatron.neox_arguments.keys.losses import Loss, TrainImpl
from megatron.neox_arguments.methods import MethodDeclaration

LOSSES = {
    "nll": Loss("objectives.language_modelling.nll", ("z_loss",)),
    "dft": Loss("objectives.language_modelling.dft"),
}  # of a token: `objectives.language_modelling.TokenLoss`

METHOD = MethodDeclaration(
    trains=lambda args: args.train_impl == "normal", impl=TrainImpl("normal", "texts", "sft_loss_type", LOSSES)
)
