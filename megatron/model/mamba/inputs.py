"""What mixers with a state are given beside hidden states, made once for all of a stage."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.model.attention.masks import document_ids


class StateInputs(NamedTuple):
    """What all blocks with a state are given for one micro-batch.

    documents: `[seq, batch]` int32, the number of each token's document, of which none knows the state of the
    one before; None: each row is a text. filled: `[seq, batch]` boolean, whether a place holds a token, where
    rows with a cache are padded; None: all do. continues: rows continue the states in the cache; else these
    begin. cu_seqlens: as of `Batch`.
    """

    documents: Tensor | None = None
    filled: Tensor | None = None
    continues: bool = False
    cu_seqlens: Tensor | None = None


def state_inputs(batch: Batch, last_tokens: Tensor | None, cached: bool) -> StateInputs:
    """The inputs of a micro-batch. last_tokens: as of `InferenceContext`; cached: whether there is a cache,
    which batches with positions continue."""
    rows, seq = batch.tokens.shape
    documents = filled = None
    if batch.cu_seqlens is not None:
        documents = document_ids(batch.cu_seqlens, rows, seq).t().contiguous()
    if cached and last_tokens is not None and seq > 1:
        filled = torch.arange(seq, device=batch.tokens.device).unsqueeze(1) <= last_tokens
    return StateInputs(documents, filled, cached and batch.positions is not None, batch.cu_seqlens)
