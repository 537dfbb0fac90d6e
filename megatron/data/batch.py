"""Defines `Batch`, the micro-batch that the model receives, and collates token samples into it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megatron.data.packed_dataset import TokenSample


class TensorRecord:
    """Base class of frozen dataclasses whose fields are tensors, nested TensorRecords, tuples of these, or
    plain values."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `function` applied to every tensor field, also in nested records."""
        changed: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = function(value)
            elif isinstance(value, TensorRecord):
                changed[field.name] = value.map(function)
            elif isinstance(value, tuple):
                changed[field.name] = tuple(v.map(function) if isinstance(v, TensorRecord) else v for v in value)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class SharedPrefixes(TensorRecord):
    """Describes a packed batch in which consecutive documents share a prompt that is stored only once.

    The fields map the batch to its expanded layout, in which every document repeats its prompt. Source:
    "Accelerating Direct Preference Optimization with Prefix Sharing", arXiv 2410.20305.
    """

    places: Tensor  # [expanded tokens] int64: place (row * seq + column) in the batch of each expanded token
    own_places: Tensor  # [batch * seq] int64: index in `places` of each batch token within its own document
    cu_seqlens: Tensor  # [n] int32, starts of expanded documents, padded as `Documents.cu_seqlens`
    max_seqlen: int = 0  # number of tokens of the longest expanded document


@dataclass(frozen=True, eq=False)
class Documents(TensorRecord):
    """The document boundaries of a batch; tokens attend only within their own document."""

    cu_seqlens: Tensor  # [n] int32, see `document_starts`
    max_seqlen: int = 0  # number of tokens of the longest document
    prefixes: SharedPrefixes | None = None  # shared prompts; `Batch.positions` then count their tokens


@dataclass(frozen=True, eq=False)
class QueryRuns(TensorRecord):
    """The queries of a context rank as runs of neighbouring columns in one document, with the keys that
    they see, for variable-length kernels."""

    cu_seqlens: Tensor  # [n] int32, starts of runs in the queries, then their number, padded as in `Documents`
    key_places: Tensor  # [keys] int64: row * columns + column of each run's keys, run after run
    key_starts: Tensor  # [n] int32, starts of the runs' keys in `key_places`
    max_seqlen: int  # number of queries of the longest run
    max_keys: int  # the largest number of keys of a run


@dataclass(frozen=True, eq=False)
class KeyBlock(TensorRecord):
    """The runs of queries that see keys of one rank of a ring. `key_places` counts that rank's columns.

    Queries of a run see all its keys. On the rank's own keys, attention is causal, aligned at the run's end.
    """

    query_places: Tensor  # [queries] int64: row * columns + column of the queries, run after run
    runs: QueryRuns


@dataclass(frozen=True, eq=False)
class HeadsPart(TensorRecord):
    """The exchange of heads for columns (Ulysses): each rank of a group gets all their columns of some
    heads."""

    order: Tensor  # [columns] int64: index of each column in the ranks' columns, laid end to end
    places: Tensor  # [ranks * places] int64: for each of these, the index of its column


@dataclass(frozen=True, eq=False)
class KeysPart(TensorRecord):
    """The columns whose queries a context rank has in attention, after any exchange of heads; the keys of the
    other columns are other ranks'."""

    queries: Tensor  # [columns] int64, ascending, padded as `ContextPart.columns`
    order: Tensor  # [seq] int64: index of each column in the queries of the ranks, laid end to end
    runs: QueryRuns  # with all keys of a row that they see: causal, aligned at the end of each run
    blocks: tuple[KeyBlock, ...] = ()  # in a ring: for the keys of this rank, of the rank before it, and so on


@dataclass(frozen=True, eq=False)
class ContextPart(TensorRecord):
    """The columns of a batch's rows that one context-parallel rank computes, see `context_parts.part_of`.

    A row that ranks cannot share evenly has padding: ranks compute its last column more than once, after
    their own columns, and leave out what comes of it.
    """

    columns: Tensor  # [places] int64, ascending
    order: Tensor  # [seq] int64: index of each column in the ranks' `columns`, laid end to end
    token_mask: Tensor | None  # [places] bool, False for padding; None: no padding
    loss_places: Tensor | None  # as `Batch.loss_places`, of this rank's columns
    starts: Tensor  # [n] int32, as `Documents.cu_seqlens`: starts of documents and of chunks in [batch, places]
    is_two_chunks: bool = True  # `columns` are a chunk at the head of the rows and one at their tail
    heads: HeadsPart | None = None  # None: no heads are exchanged
    keys: KeysPart | None = None  # None: after the exchange of heads each rank has full rows


@dataclass(frozen=True, eq=False)
class MethodBatch(TensorRecord):
    """Base class for the fields of a micro-batch that only one training method reads (see
    `training/method.py`)."""


@dataclass(frozen=True, eq=False)
class RowSources(MethodBatch):
    """The source of each row in next-token prediction (`log_loss_by_source`)."""

    rows: Tensor  # [batch] int64, index in `train_sources`


@dataclass(frozen=True, eq=False)
class Batch(TensorRecord):
    """One micro-batch for the model: integer tensors of fixed shapes."""

    tokens: Tensor  # [batch, seq] int64
    labels: Tensor  # [batch, seq] int64, already shifted; 0 where masked
    loss_weights: Tensor  # [batch, seq] int64, 0 or 1
    positions: Tensor | None = None  # [batch, seq] int64; None: 0..seq-1 in every row
    documents: Documents | None = None  # None: one document a row
    seed: int = 0  # seed of this micro-batch's dropout
    filled: Tensor | None = None  # [batch] int64, positions of each row before its padding; None: no padding
    loss_places: Tensor | None = None  # int64, see `places_of_loss`; None: the head runs at all positions
    context: ContextPart | None = None  # the columns that this context-parallel rank computes; None: all
    method: MethodBatch | None = None  # fields that one training method adds

    @property
    def num_columns(self) -> int:
        """The number of columns of each row that this rank computes, padding included."""
        return self.tokens.shape[1] if self.context is None else len(self.context.columns)

    @property
    def padding(self) -> int:
        """The number of padding positions in the batch."""
        return 0 if self.filled is None else self.tokens.numel() - int(self.filled.sum())

    def filled_places(self) -> Tensor | None:
        """Return a boolean mask of the columns that this rank computes, `[places, batch]`, False at padding;
        None if the batch has no padding."""
        device, context = self.tokens.device, self.context
        columns = torch.arange(self.num_columns, device=device) if context is None else context.columns
        token_mask = None if context is None or context.token_mask is None else context.token_mask.unsqueeze(1)
        if self.filled is None:
            return None if token_mask is None else token_mask.expand(-1, len(self.tokens))
        filled = columns.unsqueeze(1) < self.filled
        return filled if token_mask is None else filled & token_mask

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)


def collate(
    samples: np.ndarray,
    *,
    labels: np.ndarray | None = None,
    begins: np.ndarray | None = None,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    masked_ids: Sequence[int] = (),
    reset_attention_mask: bool = False,
    reset_position_ids: bool = False,
    seed: int = 0,
) -> Batch:
    """Build the `Batch` for next-token prediction from `samples`, token windows [batch, seq + 1] int64.

    labels: [batch, seq + 1], the target at each token's own position (not shifted), negative if not trained;
      None: the tokens themselves.
    begins: bool [batch, seq + 1], True at the first token of each document; None: a document begins after
      each `eod`, as in Megatron. The first position of a row always begins a document.
    eod_mask_loss: positions whose input token is `eod` are not trained (NeoX), because the next document is
      unpredictable.
    masked_ids: token ids that are never trained as targets.
    reset_attention_mask: attention stays within documents, and a document's first token is not trained.
    reset_position_ids: positions count from 0 in each document.
    """
    resets = reset_attention_mask or reset_position_ids
    if eod is None and (eod_mask_loss or (resets and begins is None)):
        raise ValueError(
            "eod is None, but eod_mask_loss needs the tokenizer's end-of-document token; reset_attention_mask and "
            "reset_position_ids need it too, unless `begins` is given"
        )
    targets = (samples if labels is None else labels)[:, 1:]
    tokens = torch.from_numpy(samples)[:, :-1].contiguous()
    trained = targets >= 0
    if eod_mask_loss:
        trained &= samples[:, :-1] != eod
    if masked_ids:
        trained &= ~np.isin(targets, masked_ids)
    positions, documents = None, None
    if resets:
        if begins is None:
            begins = np.ones(samples.shape, bool)
            begins[:, 1:] = samples[:, :-1] == eod
        if reset_position_ids:
            positions = torch.from_numpy(_positions(begins[:, :-1]))
        if reset_attention_mask:
            documents = document_starts(begins[:, :-1])
            trained &= ~begins[:, 1:]
    loss_weights = torch.from_numpy(trained.astype(np.int64))
    masked = torch.from_numpy(targets * trained)
    return Batch(tokens, masked, loss_weights, positions, documents, seed=seed, loss_places=places_of_loss(trained))


def collate_samples(
    samples: Sequence[TokenSample], length: int | None = None, *, eod: int | None = None, **options: Any
) -> Batch:
    """Collate samples of a dataset into a `Batch`, each truncated to `length` tokens (None: not truncated).

    A document begins where `TokenSample.begins` is True. In samples without labels a document also begins
    after each `eod`, as in Megatron. In samples with labels it does not, because `eod` may stand between the
    turns of a conversation. options: passed to `collate`.
    """
    width = None if length is None else length + 1
    tokens, labels, begins = (
        np.stack([getattr(sample, name)[:width] for sample in samples]) for name in ("tokens", "labels", "begins")
    )
    if eod is not None:
        unlabelled = np.array([not sample.labelled for sample in samples])
        begins[:, 1:] |= (tokens[:, :-1] == eod) & unlabelled[:, None]
    batch = collate(tokens, labels=labels, begins=begins, eod=eod, **options)
    places = tokens.shape[1] - 1
    filled = [places if sample.filled is None else min(places, sample.filled) for sample in samples]
    return replace(batch, filled=torch.tensor(filled) if sum(filled) < places * len(samples) else None)


def rechunk(batch: Batch, length: int) -> Batch:
    """Reshape rows to `length` tokens (`seq_curriculum`): [batch * seq / length, length], with the same
    tokens and labels.

    `length` must divide the length of the rows. A document that crosses the end of a new row is split into
    two documents, in attention and in positions.
    """
    rows, seq = batch.tokens.shape
    if seq == length:
        return batch
    columns = torch.arange(length)
    chunked = batch.map(lambda tensor: tensor.reshape(-1, length) if tensor.shape == (rows, seq) else tensor)
    chunked = replace(chunked, loss_places=places_of_loss(chunked.loss_weights.numpy()))
    if batch.filled is not None:
        filled = (batch.filled.unsqueeze(1) - torch.arange(0, seq, length)).clamp(0, length)
        chunked = replace(chunked, filled=filled.flatten())
    positions = None if chunked.positions is None else torch.minimum(chunked.positions, columns)
    if batch.documents is None:
        return replace(chunked, positions=positions)
    begins = np.zeros(rows * seq + 1, bool)
    begins[batch.documents.cu_seqlens.numpy()] = True
    return replace(chunked, positions=positions, documents=document_starts(begins[:-1].reshape(-1, length)))


def places_of_loss(loss_weights: np.ndarray) -> Tensor | None:
    """Return `Batch.loss_places`: the trained positions (loss weight 1), as indices into the flattened `[seq,
    batch]`.

    Untrained positions pad the indices, so that one batch shape gives at most eight sizes. Returns None if
    the list would hold more than three quarters of all positions.
    loss_weights: [batch, seq], 0 or 1.
    """
    flat = loss_weights.T.ravel()
    places = np.flatnonzero(flat)
    step = 1 << max(0, flat.size // 8 - 1).bit_length()
    size = max(1, -(-len(places) // step)) * step
    if 4 * size > 3 * flat.size:
        return None
    return torch.from_numpy(np.concatenate([places, np.flatnonzero(flat == 0)[: size - len(places)]]))


def document_starts(begins: np.ndarray) -> Documents:
    """Return the `Documents` of a batch whose documents begin where `begins` [batch, seq] is True.

    cu_seqlens [n] int32 holds the starts of all documents, with the rows laid end to end. Every row begins a
    document. The end is padded with batch * seq until n is a power of two, at most batch * seq + 1:
    variable-length kernels reserve memory and start blocks for n - 1 documents, and few values of n avoid
    fragmentation.
    """
    firsts = begins.copy()
    firsts[:, 0] = True
    places = np.flatnonzero(firsts)
    starts = padded_starts(places, begins.size, num_starts(len(places), begins.size))
    return Documents(starts, int(starts.diff().max()))


def num_starts(texts: int, size: int) -> int:
    """Return the length of `cu_seqlens` for so many texts in `size` tokens: a power of two, at most size +
    1."""
    return min(1 << texts.bit_length(), size + 1)


def padded_starts(starts: np.ndarray, size: int, n: int) -> Tensor:
    """Return the starts of texts in a tensor of `size` tokens, then `size` until the end, `[n]` int32."""
    padded = np.full(n, size, dtype=np.int32)
    padded[: len(starts)] = starts
    return torch.from_numpy(padded)


def _positions(begins: np.ndarray) -> np.ndarray:
    """Return the distance of every token from the start of its document, [batch, seq] int64.

    begins: True where documents begin.
    """
    places = np.arange(begins.shape[1])
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
