"""Turns a dataset into the micro-batches of one data-parallel rank.

Positions are counted in samples, so a run can resume anywhere in O(1), and the samples of an optimizer step
do not depend on the parallel layout or the micro-batch size.
"""

import hashlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.data.batch import Batch, RowSources, collate_samples, rechunk
from megatron.data.errors import DataError
from megatron.data.fingerprints import data_fingerprint
from megatron.data.preferences.preference_dataset import PreferenceSample
from megatron.data.preferences.responses import collate_preferences
from megatron.data.run_datasets import SampleSet
from megatron.data.set_config import masked_token_ids, trains_preferences
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.methods import declaration_of
from megatron.neox_arguments.values.losses import row_places
from megatron.neox_arguments.values.sources import train_sources


def rank_slice(start: int, count: int, rank: int, size: int) -> range:
    """Return which of the samples [start, start + count) data-parallel rank `rank` of `size` takes.

    It is a contiguous range, as in NeoX's DistributedBatchSampler.
    """
    return range(start + rank * count // size, start + (rank + 1) * count // size)


def train_slices(
    num_samples: int,
    train_batch_size: int,
    accumulation: int,
    rank: int,
    size: int,
    consumed_samples: int = 0,
    pieces: Callable[[int], int] | None = None,
) -> Iterator[range]:
    """Yield the sample numbers of each micro-batch of one data-parallel rank, `accumulation` micro-batches
    per step.

    Step k takes samples [consumed + k * B, consumed + (k + 1) * B), where B is train_batch_size. An
    incomplete last step is left out. pieces: called with the number of a step, from 0 on; returns into how
    many each of its micro-batches is split. None: none is.
    """
    for k, step in enumerate(range(consumed_samples, num_samples - train_batch_size + 1, train_batch_size)):
        micro = train_batch_size // (accumulation * (1 if pieces is None else pieces(k)))
        for start in range(step, step + train_batch_size, micro):
            yield rank_slice(start, micro, rank, size)


def eval_slices(num_samples: int, micro_batch: int, rank: int, size: int) -> Iterator[range]:
    """Yield the sample numbers of each evaluation micro-batch of one data-parallel rank, over samples [0,
    num_samples).

    Every rank gets the same number of micro-batches, all of size micro_batch. Sample numbers >= num_samples
    stand for padding.
    """
    for start in range(0, num_samples, micro_batch * size):
        yield rank_slice(start, micro_batch * size, rank, size)


def micro_batch_seed(seed: int, first_sample: int) -> int:
    """Return the dropout seed (63 bits) of the micro-batch that begins with sample `first_sample` of the
    training order.

    It is a hash of both arguments, so it is the same in every process and after every restart.
    """
    digest = hashlib.blake2b(f"{seed}:{first_sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class _MicroBatches(Dataset):
    """The dataset that torch's DataLoader reads: maps a range of sample numbers to a Batch, in the loader's
    workers.

    It returns DataError instead of raising it, because torch would wrap it in the worker's traceback.
    """

    dataset: SampleSet
    seed: int
    collate: Callable[..., Batch]
    split_rows: bool = False
    take_part: Callable[[Batch], Batch] | None = None
    source_of: Callable[[int], int] | None = None

    def __getitem__(self, item: tuple[range, int | None]) -> Batch | DataError:
        """Return the batch for `item`, a pair (sample numbers, length).

        length: how many tokens of each sample are read; None: all. With `split_rows` all tokens are read, and
          each row is split into rows of `length` tokens. A DataError is returned, not raised.
        """
        samples, length = item
        try:
            rows = [self.dataset[index] for index in samples]
        except DataError as problem:
            return problem
        seed = micro_batch_seed(self.seed, samples.start)
        if self.split_rows and length is not None:
            batch = rechunk(self.collate(rows, seed=seed), length)
        else:
            batch = self.collate(rows, length, seed=seed)
        if self.source_of is not None:
            sources = torch.tensor([self.source_of(index) for index in samples])
            pieces = len(batch.tokens) // len(samples)
            batch = replace(batch, method=RowSources(sources.repeat_interleave(pieces)))
        return batch if self.take_part is None else self.take_part(batch)


def sources_of(dataset: SampleSet, args: NeoXArgs) -> Callable[[int], int] | None:
    """Return a function that maps a sample of the training set to the index of its source in `train_sources`.

    None without `log_loss_by_source`.
    """
    if not args.log_loss_by_source:
        return None
    names, paths = train_sources(args), args.train_data_paths
    if paths is None or len(paths) == 1:
        return lambda index: 0
    numbers = [names.index(name) for name in train_sources(args, per_path=True)]
    return lambda index: numbers[next(iter(dataset.pieces(index)))[0]]


def collation(args: NeoXArgs, eod: int | None) -> Callable[..., Batch]:
    """Return the collate function for this configuration: f(samples, length=None, seed=...) -> Batch.

    eod: the tokenizer's end-of-document token. length: each sample is truncated to so many tokens; None: not
      at all.
    """
    if trains_preferences(args):
        return partial(
            collate_preferences,
            packed=args.pack_impl != "unpacked",
            rotate=declaration_of(args).mismatched_answers(args) == "rotated",
            max_length=args.max_length,
            read_last_token=row_places(args) == args.seq_length,
        )
    return partial(
        collate_samples,
        eod=eod,
        eod_mask_loss=args.eod_mask_loss,
        masked_ids=masked_token_ids(args),
        reset_attention_mask=args.reset_attention_mask,
        reset_position_ids=args.reset_position_ids,
    )


def train_loader(
    dataset: SampleSet,
    args: NeoXArgs,
    *,
    data_rank: int,
    data_size: int,
    consumed_samples: int = 0,
    eod: int | None = None,
    collate: Callable[..., Batch] | None = None,
    num_workers: int | None = None,
    pin_memory: bool = False,
    length: Callable[[int], int] | None = None,
    split_rows: bool = False,
    take_part: Callable[[Batch], Batch] | None = None,
    pieces: Callable[[int], int] | None = None,
) -> Iterator[list[Batch]]:
    """Iterate over the training micro-batches of one data-parallel rank.

    Each item is the list of `gradient_accumulation_steps` micro-batches of one optimizer step. The first step
    begins at `consumed_samples`; the last is the last complete step of the dataset. The iterator keeps no
    batch it has returned. The `num_workers` processes start at once; closing or dropping the iterator ends
    them.
    collate: makes a micro-batch of samples; None: the function from `collation`, with `eod`.
    num_workers: None: the configuration's.
    length: called with the number of a step, from 0 on; returns how many tokens of each sample are read.
      None: all.
    split_rows: read all tokens, and split each row into rows of that length instead.
    take_part: adds the part that a context-parallel rank computes; None: it computes all.
    pieces: as in `train_slices`; such a step has more micro-batches.
    Raises DataError at the step with unusable data.
    """
    batch, accumulation = args.train_batch_size, args.gradient_accumulation_steps
    if batch != args.train_micro_batch_size_per_gpu * accumulation * data_size:
        raise DataError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {args.train_micro_batch_size_per_gpu} "
            f"x gradient_accumulation_steps {accumulation} x {data_size} data-parallel ranks; change one of these"
        )
    steps = max(0, len(dataset) - consumed_samples) // batch
    workers = args.num_workers if num_workers is None else num_workers

    def num_micro_batches(step: int) -> int:
        return accumulation * (1 if pieces is None else pieces(step))

    slices = train_slices(len(dataset), batch, accumulation, data_rank, data_size, consumed_samples, pieces)
    loader = DataLoader(
        _MicroBatches(
            dataset, args.seed, collate or collation(args, eod), split_rows, take_part, sources_of(dataset, args)
        ),
        batch_size=None,  # a range of samples is one item, which becomes one Batch
        sampler=_with_lengths(slices, num_micro_batches, length),
        collate_fn=_as_is,
        num_workers=workers,
        pin_memory=pin_memory,
        # fork starts fast and shares mapped files; other platforms use their default
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        worker_init_fn=_ignore_signals if workers else None,
        generator=torch.Generator(),  # else the loader would draw from the global generator when it starts
    )
    return _steps(iter(loader), steps, num_micro_batches)


def eval_batches(
    dataset: SampleSet,
    n_samples: int,
    micro_batch: int,
    data_rank: int,
    data_size: int,
    collate: Callable[..., Batch] = collate_samples,
) -> Iterator[Batch]:
    """Yield samples [0, n_samples) of the dataset (all if it has fewer) in micro-batches of fixed size.

    Every data-parallel rank gets the same number of micro-batches. They are padded with sample 0 at loss
    weight 0, so every sample counts exactly once. collate: turns a list of samples into a Batch.
    """
    n_samples = min(n_samples, len(dataset))
    for slots in eval_slices(n_samples, micro_batch, data_rank, data_size):
        items: list[Any] = [dataset[index if index < n_samples else 0] for index in slots]
        if isinstance(items[0], PreferenceSample):
            pairs = zip(slots, items, strict=True)
            yield collate([item if index < n_samples else item.as_padding() for index, item in pairs])
            continue
        batch = collate(items)
        real = torch.tensor([index < n_samples for index in slots], dtype=torch.int64)[:, None]
        yield replace(batch, labels=batch.labels * real, loss_weights=batch.loss_weights * real)


def _with_lengths(
    slices: Iterator[range], num_micro_batches: Callable[[int], int], length: Callable[[int], int] | None
) -> Iterator[tuple[range, int | None]]:
    for step in count():
        micro_batches = list(islice(slices, num_micro_batches(step)))
        if not micro_batches:
            return
        for samples in micro_batches:
            yield samples, None if length is None else length(step)


_TRIES = 3  # attempts to check the data files; the death of a worker may interrupt an attempt


def root_cause(problem: Exception, args: NeoXArgs) -> Exception:
    """Return the DataError that explains why a data loader's worker died; any other error is returned as it
    is.

    A file that is truncated while it is mapped kills the process that reads it. Torch then raises an error in
    unrelated code that advises more memory; a process that receives a batch at that moment reports a closed
    connection.
    """
    if isinstance(problem, (OSError, EOFError)) or "DataLoader worker" in str(problem):
        for _ in range(_TRIES):
            try:
                data_fingerprint(args)  # opens all files again, and raises for a damaged file
                break
            except DataError as data_error:
                return data_error
            except RuntimeError as interruption:  # torch's error on the dead worker may be raised again meanwhile
                if "DataLoader worker" not in str(interruption):
                    raise
    return problem


def _steps(
    micro_batches: Iterator[Batch | DataError], steps: int, num_micro_batches: Callable[[int], int]
) -> Iterator[list[Batch]]:
    for step in range(steps):
        # No name is bound to the list: a suspended generator would keep the batches alive
        yield [_or_raise(next(micro_batches)) for _ in range(num_micro_batches(step))]


def _or_raise(item: Batch | DataError) -> Batch:
    if isinstance(item, DataError):
        try:
            raise item
        finally:
            del item  # else a reference cycle of frame and error would keep the workers alive
    return item


def _as_is(item: Any) -> Any:
    return item


def _ignore_signals(_worker: int) -> None:
    """Make a worker ignore terminal and scheduler signals, which go to the full process group.

    The main process handles them, and ends its workers.
    """
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGBUS, signal.SIG_DFL)  # torch's handler would print about shared memory, see root_cause
