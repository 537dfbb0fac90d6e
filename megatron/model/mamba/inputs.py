"""The inputs of Mamba's mixers besides hidden states, computed once per stage and micro-batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.model.attention.masks import document_ids
from megatron.model.mamba.context import RowChunks, row_chunks


class StateInputs(NamedTuple):
    """The inputs besides hidden states that all blocks with states share for one micro-batch.

    documents: `[seq, batch]` int32, the number of each token's document; each document starts without a
        state. None: each row is one text.
    filled: `[seq, batch]` boolean, False for padding in rows that fill a cache; None: no padding.
    continues: True: rows continue the states in the cache; False: they start without a state.
    cu_seqlens: `[n]` int32, starts of documents in the flattened batch, then its end.
    chunks: the chunks of rows that context ranks share; None: each rank has full rows. documents and
        cu_seqlens are then those of this rank's tokens, and other ones in each chunk.
    """

    documents: Tensor | None = None
    filled: Tensor | None = None
    continues: bool = False
    cu_seqlens: Tensor | None = None
    chunks: RowChunks | None = None


def shared_row_inputs(batch: Batch, ranks: int, rank: int, tail: int) -> StateInputs:
    """Returns the inputs of blocks with states for the columns that a context rank computes.

    tail: number of tokens before a chunk that convolutions need. Raises DataError if rows are too short.
    """
    assert batch.context is not None
    chunks = row_chunks(batch, ranks, rank, tail)
    return StateInputs(chunks.scanned_documents, cu_seqlens=batch.context.starts, chunks=chunks)


def state_inputs(batch: Batch, last_tokens: Tensor | None, cached: bool) -> StateInputs:
    """Returns the inputs of blocks with states for a micro-batch.

    last_tokens: `[batch]`, the index of the last token of each row, if rows are padded; else None.
    cached: whether there is a cache; a batch with positions continues the texts in it.
    """
    rows, seq = batch.tokens.shape
    starts = None if batch.documents is None else batch.documents.cu_seqlens
    documents = None if starts is None else document_ids(starts, rows, seq).t().contiguous()
    filled = None
    if cached and last_tokens is not None and seq > 1:
        filled = torch.arange(seq, device=batch.tokens.device).unsqueeze(1) <= last_tokens
    return StateInputs(documents, filled, cached and batch.positions is not None, starts)
