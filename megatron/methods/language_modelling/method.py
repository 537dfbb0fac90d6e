"""Next-token prediction, for pretraining and supervised fine-tuning."""

from megatron.methods.language_modelling.declaration import LOSSES
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.sources import train_sources
from megatron.objectives import Objective, language_modelling
from megatron.training import method


class Method(method.Method):
    """Trains a model to predict the next token of texts; in conversations, only of the trained tokens."""

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of next-token prediction."""
        loss = LOSSES[args.sft_loss_type].load_function()
        labelled = args.train_label_data_paths is not None
        return language_modelling(
            args.z_loss, loss=loss, statistics=labelled, columns=args.softmax_rows,
            sources=train_sources(args) if args.log_loss_by_source else (),
            row_sums=args.log_spikes_above_sigma is not None, mtp_layers=args.mtp_num_layers or 0,
            mtp_factor=args.mtp_loss_scaling_factor,
        )  # fmt: skip
