"""Divides the rows of a batch over context-parallel ranks."""

from dataclasses import replace

import numpy as np
import torch

from megatron.data.batch import Batch, ContextPart, QueryRuns, num_starts, padded_starts, places_of_loss


def context_columns(seq: int, rank: int, ranks: int, multiple: int = 1) -> np.ndarray:
    """Return the columns of rows of `seq` tokens that a context-parallel rank computes, ascending, `[places]`
    int64.

    Rows have 2 * ranks chunks of equal length. Rank r has chunk r and chunk 2 * ranks - 1 - r, so that causal
    attention costs every rank the same (as in Megatron-LM). Columns >= seq are padding. multiple: the result
    has a multiple of so many columns.
    """
    chunk = -(-seq // (2 * ranks))
    while 2 * chunk % multiple:
        chunk += 1
    head, tail = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return np.concatenate([np.arange(head, head + chunk), np.arange(tail, tail + chunk)])


def part_of(batch: Batch, rank: int, ranks: int, multiple: int = 1) -> Batch:
    """Return the batch with its `ContextPart` for a context-parallel rank; unchanged if it has one already.

    multiple: each rank computes a multiple of so many columns.
    """
    if ranks == 1 or batch.context is not None:
        return batch
    rows, seq = batch.tokens.shape
    everyone = [context_columns(seq, r, ranks, multiple) for r in range(ranks)]
    columns, order = everyone[rank], np.argsort(np.concatenate(everyone), kind="stable")[:seq]
    token_mask, columns = columns < seq, columns.clip(max=seq - 1)
    loss_weights = batch.loss_weights.cpu().numpy()[:, columns] * token_mask
    part = ContextPart(
        torch.from_numpy(columns), torch.from_numpy(order), None if token_mask.all() else torch.from_numpy(token_mask),
        _query_runs(_begins(batch), columns, token_mask), places_of_loss(loss_weights),
    )  # fmt: skip
    device = batch.tokens.device
    return replace(batch, context=part if device.type == "cpu" else part.map(lambda tensor: tensor.to(device)))


def _begins(batch: Batch) -> np.ndarray:
    """Return whether a document begins at each token, bool `[batch, seq]`."""
    begins = np.zeros(batch.tokens.shape, bool)
    begins[:, 0] = True
    if batch.documents is not None:
        starts = batch.documents.cu_seqlens.cpu().numpy()
        begins.ravel()[starts[starts < begins.size]] = True
    return begins


def _query_runs(begins: np.ndarray, columns: np.ndarray, token_mask: np.ndarray) -> QueryRuns:
    """Return the `QueryRuns` of a rank's columns.

    Padding forms one run in each row, whose keys are copies of its column: attention there is finite.
    begins: `[batch, seq]`, True where documents begin.
    """
    rows, seq = begins.shape
    firsts = begins[:, columns]
    firsts[:, 0] = True
    firsts[:, 1:] |= np.diff(columns) != 1
    firsts[:, ~token_mask] = False
    if not token_mask.all():
        firsts[:, int(token_mask.sum())] = True
    starts = np.flatnonzero(firsts)
    lengths = np.diff(np.append(starts, firsts.size))
    row, place = np.divmod(starts, len(columns))
    document = np.maximum.accumulate(np.where(begins, np.arange(seq), 0), axis=1)  # each column's document's start
    is_padding = ~token_mask[place]
    first_key = np.where(is_padding, columns[place], document[row, columns[place]])
    keys = np.where(is_padding, lengths, columns[place] + lengths - first_key)
    ends = np.cumsum(keys)
    steps = np.arange(ends[-1]) - np.repeat(ends - keys, keys)
    key_places = np.repeat(row * seq + first_key, keys) + steps * np.repeat(~is_padding, keys)
    step = 1 << max(0, len(key_places) // 8 - 1).bit_length()  # few lengths, which avoids fragmentation
    key_places = np.append(key_places, np.zeros(-len(key_places) % step, np.int64))
    n = num_starts(len(starts), firsts.size)
    return QueryRuns(
        padded_starts(starts, firsts.size, n), torch.from_numpy(key_places),
        padded_starts(ends - keys, int(ends[-1]), n), int(lengths.max()), int(keys.max()),
    )  # fmt: skip
