"""Decides whether the key `split` also divides the data sets of `train_data_paths`."""

from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import sample_kind


def cuts_listed_paths(args: ResolvedArgs) -> bool:
    """Returns whether `split` divides each of `train_data_paths` into train, validation and test documents.

    True if the user set `split`, and neither valid_data_paths nor test_data_paths. GPT-NeoX applies `split`
    to data_path only.
    """
    if args.data_path is not None or not args.train_data_paths or sample_kind(args) != "texts":
        return False
    only_training = args.valid_data_paths is None and args.test_data_paths is None
    return only_training and args.user_values.get("split") is not None
