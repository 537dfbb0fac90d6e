"""Whether `split` cuts the listed training data, too."""

from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import sample_kind


def cuts_listed_paths(args: ResolvedArgs) -> bool:
    """Whether train, validation and test documents are parts of each of `train_data_paths`: a `split` that is
    written, and neither valid_data_paths nor test_data_paths. GPT-NeoX reads `split` with data_path alone."""
    if args.data_path is not None or not args.train_data_paths or sample_kind(args) != "texts":
        return False
    alone = args.valid_data_paths is None and args.test_data_paths is None
    return alone and args.user_values.get("split") is not None
