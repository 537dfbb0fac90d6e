"""Assigns samples to data-parallel ranks and micro-batches.

It counts in samples, so a run can resume anywhere in O(1), and the samples of an optimizer step do not depend
on layout or micro-batch size.
"""

from collections.abc import Iterator

from megatron.neox_arguments import NeoXArgs


def rank_slice(start: int, count: int, rank: int, size: int) -> range:
    """Return which of the samples [start, start + count) data rank `rank` of `size` takes: a contiguous
    range, as in NeoX's DistributedBatchSampler."""
    return range(start + rank * count // size, start + (rank + 1) * count // size)


def train_slices(
    num_samples: int, train_batch_size: int, accumulation: int, rank: int, size: int, consumed_samples: int = 0
) -> Iterator[range]:
    """Yield the sample numbers of each micro-batch of one data rank, `accumulation` micro-batches per step.

    Step k takes samples [consumed + k * B, consumed + (k + 1) * B), where B is train_batch_size. The last
    step is the last that num_samples fill.
    """
    micro = train_batch_size // accumulation
    for step in range(consumed_samples, num_samples - train_batch_size + 1, train_batch_size):
        for start in range(step, step + train_batch_size, micro):
            yield rank_slice(start, micro, rank, size)


def eval_slices(num_samples: int, micro_batch: int, rank: int, size: int) -> Iterator[range]:
    """Yield the sample numbers of each micro-batch of one data rank over samples [0, num_samples).

    Every rank gets the same number of micro-batches, all of size micro_batch. Sample numbers >= num_samples
    stand for padding.
    """
    for start in range(0, num_samples, micro_batch * size):
        yield rank_slice(start, micro_batch * size, rank, size)


def data_seed(args: NeoXArgs) -> int:
    """Return the seed of the order of samples: `data_seed`, else `seed`."""
    return args.seed if args.data_seed is None else args.data_seed
