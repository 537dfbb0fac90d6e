"""Defines the answers of a micro-batch that losses compare, and collates samples with answers into a
micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.data.batch import Batch, MethodBatch, SharedPrefixes, collate_samples
from megatron.data.labels import MASKED
from megatron.data.preferences.mismatched_answers import rotate_responses
from megatron.data.preferences.preference_dataset import PreferenceSample


@dataclass(frozen=True, eq=False)
class Responses(MethodBatch):
    """The answers (responses) of a micro-batch, numbered from 0 over the micro-batch.

    A pair is responses 2p (chosen) and 2p + 1 (rejected) and is never split over micro-batches. A KTO example
    is one response. The score of a response is the sum of log-probabilities over its positions with loss
    weight 1.
    """

    response_ids: Tensor  # [batch, seq] int64: response number at each position, prompt included; -1: none
    preference_labels: Tensor  # [n] float32: for pairs 1; for KTO the weight, negative if undesirable; padding 0
    reference_logprobs: Tensor | None = None  # [n] float32, reference score of each response; None: unknown
    margins: Tensor | None = None  # [n / 2] float32, by which the chosen response of a pair should win; None: 0
    kl_batch: Batch | None = None  # KTO: mismatched responses, scored without gradients; all count in its KL
    baseline: Tensor | None = None  # [n] float32, subtracted from each response's score; the objective fills it
    sampler_logprobs: Tensor | None = None  # [batch, seq] float32, of labels when the model sampled them


def batch_responses(batch: Batch) -> Responses:
    """Return the answers of a batch. The batch must have answers."""
    assert isinstance(batch.method, Responses), "the batch has no answers: `batch.method` is no Responses"
    return batch.method


def with_responses(batch: Batch, **changes: Any) -> Batch:
    """Return a copy of the batch with some fields of its `Responses` replaced by `changes`."""
    return replace(batch, method=replace(batch_responses(batch), **changes))


def collate_preferences(
    samples: Sequence[PreferenceSample],
    length: int | None = None,
    *,
    packed: bool,
    rotate: bool = False,
    max_length: int | None = None,
    read_last_token: bool = False,
    seed: int = 0,
) -> Batch:
    """Collate preference samples into a Batch: the rows of all samples in order, responses numbered over the
    batch.

    packed: rows hold several documents, separate in attention and positions.
    rotate: make `kl_batch` from the samples themselves (`rotate_responses`), truncated to max_length tokens.
    read_last_token: the last token of a row is also an input, not only a label; rows become one position
      longer.
    Raises ValueError if `length` is not None.
    """
    if length is not None:
        raise ValueError(
            "curriculum_learning cannot shorten rows of answers; remove curriculum_learning, or train on text"
        )
    if read_last_token:
        samples = [_one_place_longer(sample) for sample in samples]
    if rotate:
        samples = rotate_responses(samples, max_length)
    rows = [row for sample in samples for row in sample.rows]
    batch = collate_samples(rows, reset_attention_mask=packed, reset_position_ids=packed, seed=seed)
    response_offsets = np.cumsum([0] + [len(sample.preference_labels) for sample in samples]).tolist()
    numbered = [
        np.where(row >= 0, row + offset, -1)
        for sample, offset in zip(samples, response_offsets, strict=False)
        for row in sample.response_ids
    ]
    references = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
    margins = [sample.margins for sample in samples if sample.margins is not None]
    response_ids = torch.from_numpy(np.stack(numbered)[:, :-1].copy())
    if any(sample.prefix_lengths is not None for sample in samples):
        no_prefixes = [np.zeros(len(sample.preference_labels), np.int64) for sample in samples]
        lengths = [
            zeros if s.prefix_lengths is None else s.prefix_lengths
            for s, zeros in zip(samples, no_prefixes, strict=True)
        ]
        batch = share_prefixes(batch, response_ids, np.concatenate(lengths))
    kl_samples = [sample.kl_sample for sample in samples if sample.kl_sample is not None]
    responses = Responses(
        response_ids,
        torch.from_numpy(np.concatenate([sample.preference_labels for sample in samples])),
        torch.from_numpy(np.concatenate(references)) if references else None,
        torch.from_numpy(np.concatenate(margins)) if margins else None,
        collate_preferences(kl_samples, packed=packed, seed=seed) if kl_samples else None,
    )
    return replace(batch, method=responses)


def _one_place_longer(sample: PreferenceSample) -> PreferenceSample:
    """Return the sample with one more padding position at the end of each row."""
    rows = tuple(
        replace(
            row,
            tokens=np.append(row.tokens, 0),
            labels=np.append(row.labels, MASKED),
            begins=np.append(row.begins, True),
        )
        for row in sample.rows
    )
    return replace(sample, rows=rows, response_ids=tuple(np.append(row, -1) for row in sample.response_ids))


def share_prefixes(batch: Batch, response_ids: Tensor, lengths: np.ndarray) -> Batch:
    """Return a batch of packed documents with `Documents.prefixes` set; positions then count each document's
    prefix too.

    response_ids: `[batch, seq]`, as in `Responses`.
    lengths: [n] int64, for each response the length in tokens of the prefix that it shares with the response
      before it in the same row.
    """
    assert batch.documents is not None and batch.positions is not None
    total, padded = batch.tokens.numel(), batch.documents.cu_seqlens.numpy()
    starts = padded[: np.searchsorted(padded, total)].astype(np.int64)
    response = response_ids.numpy().ravel()[starts]
    prefix = np.where(response >= 0, lengths[np.maximum(response, 0)], 0)
    own_lengths = np.diff(starts, append=total)
    shift = np.cumsum(prefix)  # how far each document's own tokens move in the expanded layout
    ends = np.cumsum(own_lengths) + shift
    written = np.concatenate([[0], ends])
    number = np.repeat(np.arange(len(starts)), own_lengths + prefix)
    offset = np.arange(ends[-1]) - written[number] - prefix[number]
    prefix_places = starts[number - 1] + offset + prefix[number]
    places = np.where(offset < 0, prefix_places, starts[number] + offset)
    cu_seqlens = np.full(len(padded), ends[-1], np.int32)
    cu_seqlens[: len(starts)] = written[:-1]
    prefixes = SharedPrefixes(
        torch.from_numpy(places),
        torch.from_numpy(np.arange(total) + np.repeat(shift, own_lengths)),
        torch.from_numpy(cu_seqlens),
        int((own_lengths + prefix).max()),
    )
    positions = batch.positions + torch.from_numpy(np.repeat(prefix, own_lengths)).view_as(batch.positions)
    return replace(batch, positions=positions, documents=replace(batch.documents, prefixes=prefixes))
