"""From the configuration to the train, validation and test sets of a run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.data.errors import DataError
from megatron.data.index_maps import DataState
from megatron.data.packed_dataset import PackedDataset
from megatron.data.preferences.preference_sets import build_preference_sets, preference_samples_per_epoch
from megatron.data.run_datasets import Datasets
from megatron.data.sequences import SequenceDataset
from megatron.data.set_config import masked_token_ids, names_missing_data, trains_preferences
from megatron.data.text_sets import build_text_sets, text_samples_per_epoch
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import sample_kind


@names_missing_data
def build_datasets(
    args: NeoXArgs,
    *,
    train_batch_size: int,
    once: Callable[[Callable[[], Any]], Any],
    epochs: int | None = None,
    data_state: DataState | None = None,
) -> Datasets:
    """Build the sets of `data_path` + `split`, or of the listed paths; several paths of one list are blended
    by weight.

    once: called on every rank with a function that does all work on whole files: checks, hashes, and writing
    the index maps that the cache does not hold. It must call that function on one rank, return its result on
    all ranks, and raise on all ranks what it raised there.
    epochs: passes over the training set (see `epoch_iterations`); None: as many samples as `train_iters`
    steps take. data_state: of the run that is resumed, whose samples keep their order; None: a new run.
    Raises DataError for data that cannot be used. A run that writes its own samples has no sets.
    """
    if sample_kind(args) == "rollouts":
        return Datasets(None, None, None)
    build = build_preference_sets if trains_preferences(args) else build_text_sets
    return build(args, train_batch_size, once, epochs, data_state or DataState())


def with_sequences(args: NeoXArgs, datasets: Datasets, eod: int | None) -> Datasets:
    """The sets, that to forget by its sequences where the loss is of these (`ga_loss_type`)."""
    if args.ga_loss_type == "nll" or not isinstance(datasets.forget, PackedDataset):
        return datasets
    forget = SequenceDataset(
        datasets.forget,
        apart=args.reset_attention_mask,
        eod=eod,
        mask_after_eod=args.eod_mask_loss,
        masked_ids=masked_token_ids(args),
    )
    return replace(datasets, forget=forget)


@names_missing_data
def epoch_iterations(args: NeoXArgs, train_batch_size: int, data_state: DataState | None = None) -> int:
    """Optimizer steps of `train_epochs` passes over the training data; last samples that fill no batch are
    left out.

    data_state: of the run that is resumed, whose steps so far may have had another batch size.
    Raises DataError for data that cannot be used, or that is less than one batch.
    """
    assert args.train_epochs is not None
    per_epoch = (preference_samples_per_epoch if trains_preferences(args) else text_samples_per_epoch)(args)
    samples = args.train_epochs * per_epoch
    if samples < train_batch_size:
        raise DataError(
            f"train_epochs: {args.train_epochs} passes over {per_epoch} samples do not fill a train_batch_size "
            f"of {train_batch_size}; use more epochs, more data or a smaller batch"
        )
    state = data_state or DataState()
    return state.iteration + max(0, samples - state.consumed_samples) // train_batch_size
