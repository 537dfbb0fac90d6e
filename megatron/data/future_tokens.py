"""Shifts a batch for multi-token prediction: the tokens that each depth reads and predicts."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.data.batch import Batch


class FutureTokens(NamedTuple):
    """The tokens of a batch that depth k of multi-token prediction reads and predicts, in full rows.

    A position whose token i + k is in another document, or beyond the row, reads token 0 and is not trained;
    no trained position sees it, since attention is causal.

    tokens: `[batch, seq]`, token i + k at position i. positions: of these tokens.
    labels: token i + k + 1 at position i. loss_weights: of the labels, 0 where they are not trained.
    in_document: `[batch, seq]` boolean, False where token i + k is of another document or beyond the row.
    loss_places: as `Batch.loss_places`, for these loss weights.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    loss_weights: Tensor
    in_document: Tensor
    loss_places: Tensor | None


def future_tokens(batch: Batch, depth: int) -> FutureTokens:
    """Returns what depth `depth`, counted from 1, of multi-token prediction reads and predicts.

    Documents are those of `Batch.documents`; where positions begin anew, a document begins too. Without both,
    each row is one document.
    """
    rows, seq = batch.tokens.shape
    columns = torch.arange(seq, device=batch.tokens.device)

    def shifted(values: Tensor) -> Tensor:
        return values.roll(-depth, 1)

    in_document = (columns < seq - depth).expand(rows, seq)
    if batch.documents is not None:
        flat = torch.arange(rows * seq, dtype=torch.int32, device=columns.device)
        ids = torch.searchsorted(batch.documents.cu_seqlens, flat, right=True).view(rows, seq)
        in_document = in_document & (shifted(ids) == ids)
    if batch.filled is not None:
        in_document = in_document & (columns + depth < batch.filled.unsqueeze(1))
    positions = columns.expand(rows, seq) if batch.positions is None else batch.positions
    in_document = in_document & (shifted(positions) == positions + depth)
    tokens, labels, weights, new_positions = (
        shifted(values) * in_document for values in (batch.tokens, batch.labels, batch.loss_weights, positions)
    )
    # Places count positions of [seq, batch] row by row. Those of the first columns go round to the last ones,
    # which have no loss weight.
    places = None if batch.loss_places is None else (batch.loss_places - depth * rows) % (rows * seq)
    return FutureTokens(tokens, new_positions, labels, weights, in_document, places)
