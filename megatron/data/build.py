"""Builds the train, validation and test sets of a run from its configuration."""

from collections.abc import Callable
from typing import Any

from megatron.data.errors import DataError
from megatron.data.index_maps import DataState
from megatron.data.preferences.preference_sets import build_preference_sets, preference_samples_per_epoch
from megatron.data.run_datasets import Datasets
from megatron.data.set_config import names_missing_data, trains_preferences
from megatron.data.text_sets import build_text_sets, text_samples_per_epoch
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import sample_kind


@names_missing_data
def build_datasets(
    args: NeoXArgs,
    *,
    train_batch_size: int,
    on_one_rank: Callable[[Callable[[], Any]], Any],
    epochs: int | None = None,
    data_state: DataState | None = None,
) -> Datasets:
    """Build the train, validation and test sets from `data_path` and `split`, or from lists such as
    `train_data_paths`.

    If a list has several paths, their datasets are blended by weight.
    on_one_rank: called on every rank with a function that does all work on full files: checks, hashes, and
      writing missing index maps. It must call that function on one rank, return its result on all ranks, and
      raise its exception on all ranks.
    epochs: passes over the training set (see `epoch_iterations`); None: as many samples as `train_iters`
      steps take.
    data_state: the position of a resumed run in its data; its samples keep their order. None: a new run.
    Raises DataError for unusable data. A run that trains on its own generations (rollouts) has no sets.
    """
    if sample_kind(args) == "generated":
        return Datasets(None, None, None)
    build = build_preference_sets if trains_preferences(args) else build_text_sets
    return build(args, train_batch_size, on_one_rank, epochs, data_state or DataState())


@names_missing_data
def epoch_iterations(args: NeoXArgs, train_batch_size: int, data_state: DataState | None = None) -> int:
    """Return the optimizer step at which `train_epochs` passes over the training data end; an incomplete
    batch is dropped.

    data_state: the position of a resumed run; its earlier steps may have used another batch size. Raises
      DataError for unusable data, or if all passes together do not fill one batch.
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
