"""Which samples a data-parallel rank takes, and in which micro-batch. Counted in samples, so that a run can
go on anywhere in O(1), and the samples of an optimizer step do not depend on layout or micro-batch size."""

from collections.abc import Iterator

from megatron.neox_arguments import NeoXArgs


def rank_slice(first: int, count: int, rank: int, size: int) -> range:
    """The contiguous share of `rank` among `count` samples from `first` on (NeoX's
    DistributedBatchSampler)."""
    return range(first + rank * count // size, first + (rank + 1) * count // size)


def train_slices(
    num_samples: int, train_batch_size: int, accumulation: int, rank: int, size: int, consumed_samples: int = 0
) -> Iterator[range]:
    """Sample numbers of every micro-batch of one data rank, `accumulation` of them a step.

    Step k takes samples [consumed + k * B, consumed + (k + 1) * B); ends with the last whole step of
    num_samples.
    """
    micro = train_batch_size // accumulation
    for step in range(consumed_samples, num_samples - train_batch_size + 1, train_batch_size):
        for first in range(step, step + train_batch_size, micro):
            yield rank_slice(first, micro, rank, size)


def eval_slices(num_samples: int, micro_batch: int, rank: int, size: int) -> Iterator[range]:
    """Micro-batches of one data rank over samples [0, num_samples): as many on every rank, all of size
    micro_batch.

    Numbers from num_samples on stand for padding.
    """
    for first in range(0, num_samples, micro_batch * size):
        yield rank_slice(first, micro_batch * size, rank, size)


def data_seed(args: NeoXArgs) -> int:
    """The seed of the order of samples: `data_seed`, else `seed`."""
    return args.seed if args.data_seed is None else args.data_seed
