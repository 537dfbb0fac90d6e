"""Next-token prediction, for pretraining and supervised fine-tuning."""

from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective, language_modelling, loss_function
from megatron.training import method


class Method(method.Method):
    """Predicts the next token of texts; of conversations, the trained ones."""

    def objective(self, args: NeoXArgs) -> Objective:
        """See `Method`."""
        loss, labelled = loss_function("normal", args.sft_loss_type), args.train_label_data_paths is not None
        return language_modelling(args.z_loss, loss=loss, statistics=labelled, columns=args.softmax_rows)
