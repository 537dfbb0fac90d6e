"""The one Batch type that data hands to the model, and how samples are collated into it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample
from megatron.data.preferences.kto import rotate_responses
from megatron.data.preferences.preference_dataset import PreferenceSample

Role = Literal["train", "forget", "retain", "on_policy"]


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Documents that begin with the first tokens of the document before, which the row holds once
    ("Accelerating Direct Preference Optimization with Prefix Sharing", arXiv 2410.20305).

    It says how the documents of a micro-batch lie when each is written out with its prefix.
    """

    places: Tensor  # [tokens written out] int64: row * seq + column of each
    own: Tensor  # [batch * seq] int64: index in `places` of each place's token behind its own prefix
    cu_seqlens: Tensor  # [n] int32, starts of documents written out, padded as `Batch.cu_seqlens`
    max_seqlen: int = 0  # number of tokens of the longest document written out

    def map(self, function: Callable[[Tensor], Tensor]) -> "SharedPrefixes":
        """The same with `function` applied to every tensor."""
        return replace(self, places=function(self.places), own=function(self.own), cu_seqlens=function(self.cu_seqlens))


@dataclass(frozen=True, eq=False)
class RolloutValues:
    """What is known of the answers of a micro-batch that its model wrote, one a row."""

    advantages: Tensor  # [batch] float32
    sampler_logprobs: Tensor  # [batch, seq] float32, of labels, as they were drawn; 0 where none is trained
    old_logprobs: Tensor | None = None  # [batch, seq] float32, before the first step on these answers; None: this is it
    reference_logprobs: Tensor | None = None  # [batch, seq] float32, of the reference; None: not (yet) known

    def map(self, function: Callable[[Tensor], Tensor]) -> "RolloutValues":
        """The same with `function` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(value) for name, value in values.items() if isinstance(value, Tensor)})


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch: integer tensors of fixed sizes.

    Preference training adds responses, numbered from 0 over the micro-batch. A pair is responses 2p (chosen)
    and 2p + 1 (rejected) and is never split over micro-batches; an example of KTO is one response. The score
    of a response is the sum of log-probabilities over its places whose loss weight is 1.
    preference_labels: of pairs 1, and 0 for padding; of KTO's examples their weight, negative for undesirable
    ones.
    """

    tokens: Tensor  # [batch, seq] int64
    labels: Tensor  # [batch, seq] int64, already shifted; 0 where masked
    loss_weights: Tensor  # [batch, seq] int64, 0 or 1
    positions: Tensor | None = None  # [batch, seq] int64; None: 0..seq-1 in every row
    cu_seqlens: Tensor | None = None  # int32, see `document_starts`; None: one document a row
    max_seqlen: int = 0  # with cu_seqlens: number of tokens of the longest document
    rewards: Tensor | None = None  # [batch] float32, of each row's document
    seed: int = 0  # of this micro-batch's dropout
    response_ids: Tensor | None = None  # [batch, seq] int64: response of each place, prompt included; -1: none's
    preference_labels: Tensor | None = None  # [n] float32, of each response, see above
    reference_logprobs: Tensor | None = None  # [n] float32, sum of each response; None: not (yet) known
    margins: Tensor | None = None  # [n / 2] float32, by which the chosen response of a pair should win; None: 0
    kl_batch: "Batch | None" = None  # KTO: mismatched responses, scored without gradients; all count in its KL
    baseline: Tensor | None = None  # [n] float32, subtracted from each response's score; the objective fills it
    prefixes: SharedPrefixes | None = None  # with cu_seqlens: what documents share; positions then count it
    padding: int = 0  # places that hold no document
    filled: Tensor | None = None  # [batch] int64, places of each row that do, its first ones; None: all
    loss_places: Tensor | None = None  # int64, see `places_of_loss`; None: all go through the head
    role: Role = "train"  # which data it is of: unlearning has two sets more, and a student may write its own
    # Gives a function the final hidden states and output layer (`mpu.HeadInput.use`) of the model that this
    # one is compared with: the reference, or a teacher
    reference_output: Callable[[Callable[..., Any]], Any] | None = None
    top_ids: Tensor | None = None  # [batch, seq, k] int64, the teacher's most likely tokens of each place
    top_logprobs: Tensor | None = None  # [batch, seq, k + 1] float32, of these, and of all others together
    rollout: RolloutValues | None = None  # of answers that the model wrote, whose `rewards` may be NaN: none

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The same batch with `function` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
        if self.kl_batch is not None:
            changed["kl_batch"] = self.kl_batch.map(function)
        if self.prefixes is not None:
            changed["prefixes"] = self.prefixes.map(function)
        if self.rollout is not None:
            changed["rollout"] = self.rollout.map(function)
        return replace(self, **changed)

    def filled_places(self) -> Tensor | None:
        """`[seq, batch]` boolean, whether a document is there; None: everywhere."""
        if self.filled is None:
            return None
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).unsqueeze(1) < self.filled

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)


def collate(
    samples: np.ndarray,
    *,
    labels: np.ndarray | None = None,
    begins: np.ndarray | None = None,
    rewards: np.ndarray | None = None,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    masked_ids: Sequence[int] = (),
    reset_attention_mask: bool = False,
    reset_position_ids: bool = False,
    seed: int = 0,
) -> Batch:
    """Next-token batch of windows [batch, seq + 1] int64.

    labels: of the tokens in the same places, negative where one is not trained; None: the tokens.
    begins: where documents begin, boolean, as the data has them; None: after each `eod` (Megatron). The first
    place of a row always begins one.
    rewards: [batch] float32, of each row's document.
    eod_mask_loss leaves out the positions whose input token is `eod` (NeoX): what follows a document's end is
    chance. masked_ids: labels that are not trained, wherever they stand.
    reset_attention_mask: attention stays in documents, and no document's first token is predicted from the
    one before. reset_position_ids: positions count from 0 in each document.
    """
    resets = reset_attention_mask or reset_position_ids
    if eod is None and (eod_mask_loss or (resets and begins is None)):
        raise ValueError("eod_mask_loss, and resets without `begins`, need the tokenizer's end-of-document token")
    targets = (samples if labels is None else labels)[:, 1:]
    tokens = torch.from_numpy(samples)[:, :-1].contiguous()
    trained = targets >= 0
    if eod_mask_loss:
        trained &= samples[:, :-1] != eod
    if masked_ids:
        trained &= ~np.isin(targets, masked_ids)
    positions, cu_seqlens, max_seqlen = None, None, 0
    if resets:
        if begins is None:
            begins = np.ones(samples.shape, bool)
            begins[:, 1:] = samples[:, :-1] == eod
        if reset_position_ids:
            positions = torch.from_numpy(_positions(begins[:, :-1]))
        if reset_attention_mask:
            starts, max_seqlen = document_starts(begins[:, :-1])
            cu_seqlens = torch.from_numpy(starts)
            trained &= ~begins[:, 1:]
    loss_weights = torch.from_numpy(trained.astype(np.int64))
    reward = None if rewards is None else torch.from_numpy(rewards)
    masked = torch.from_numpy(targets * trained)
    batch = Batch(tokens, masked, loss_weights, positions, cu_seqlens, max_seqlen, reward, seed)
    return replace(batch, loss_places=places_of_loss(trained))


def collate_samples(
    samples: Sequence[TokenSample], length: int | None = None, *, eod: int | None = None, **options: Any
) -> Batch:
    """`collate` of a dataset's samples, of each the first `length` tokens (None: all).

    Documents are those of the dataset; in sets without labels they also end with each `eod` (Megatron). With
    labels they do not: there it may stand between the turns of one conversation.
    """
    width = None if length is None else length + 1
    tokens, labels, begins = (
        np.stack([getattr(sample, name)[:width] for sample in samples]) for name in ("tokens", "labels", "begins")
    )
    if eod is not None:
        unlabelled = np.array([not sample.labelled for sample in samples])
        begins[:, 1:] |= (tokens[:, :-1] == eod) & unlabelled[:, None]
    rewards = [sample.reward for sample in samples]
    given = None if None in rewards else np.array(rewards, np.float32)
    batch = collate(tokens, labels=labels, begins=begins, rewards=given, eod=eod, **options)
    places = tokens.shape[1] - 1
    filled = [places if sample.filled is None else min(places, sample.filled) for sample in samples]
    padding = places * len(samples) - sum(filled)
    tops = [sample.top for sample in samples if sample.top is not None]
    if tops:
        ids, logprobs = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*tops, strict=True))
        batch = replace(batch, top_ids=ids, top_logprobs=logprobs)
    return replace(batch, padding=padding, filled=torch.tensor(filled) if padding else None)


def collate_preferences(
    samples: Sequence[PreferenceSample],
    length: int | None = None,
    *,
    packed: bool,
    rotate: bool = False,
    max_length: int | None = None,
    whole: bool = False,
    seed: int = 0,
) -> Batch:
    """A batch of preference samples: the rows of every sample, one after another, and their responses
    numbered on.

    packed: rows hold several documents, which attention and positions keep apart. rotate: `kl_batch` is made
    of the samples themselves (`kto.rotate_responses`), cut to max_length tokens. whole: the last token of a
    row is read too, and not only predicted. Raises ValueError for a `length`.
    """
    if length is not None:
        raise ValueError("answers are not cut to the lengths of a curriculum")
    if whole:
        samples = [_one_place_longer(sample) for sample in samples]
    if rotate:
        samples = rotate_responses(samples, max_length)
    rows = [row for sample in samples for row in sample.rows]
    batch = collate_samples(rows, reset_attention_mask=packed, reset_position_ids=packed, seed=seed)
    before = np.cumsum([0] + [len(sample.preference_labels) for sample in samples]).tolist()
    numbered = [
        np.where(row >= 0, row + offset, -1)
        for sample, offset in zip(samples, before, strict=False)
        for row in sample.response_ids
    ]
    references = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
    margins = [sample.margins for sample in samples if sample.margins is not None]
    response_ids = torch.from_numpy(np.stack(numbered)[:, :-1].copy())
    if any(sample.prefix_lengths is not None for sample in samples):
        none = [np.zeros(len(sample.preference_labels), np.int64) for sample in samples]
        lengths = [
            zeros if s.prefix_lengths is None else s.prefix_lengths for s, zeros in zip(samples, none, strict=True)
        ]
        batch = share_prefixes(batch, response_ids, np.concatenate(lengths))
    kl_samples = [sample.kl_sample for sample in samples if sample.kl_sample is not None]
    return replace(
        batch,
        response_ids=response_ids,
        preference_labels=torch.from_numpy(np.concatenate([sample.preference_labels for sample in samples])),
        reference_logprobs=torch.from_numpy(np.concatenate(references)) if references else None,
        margins=torch.from_numpy(np.concatenate(margins)) if margins else None,
        kl_batch=collate_preferences(kl_samples, packed=packed, seed=seed) if kl_samples else None,
    )


def _one_place_longer(sample: PreferenceSample) -> PreferenceSample:
    """The sample with one more place of padding at the end of each row."""
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
    """A batch of packed documents with `Batch.prefixes`, and positions that count them.

    response_ids: `[batch, seq]`, as of `Batch`. lengths: [n] int64 of each response: how many of the first
    tokens of the response before, in the same row, come before its own.
    """
    assert batch.cu_seqlens is not None and batch.positions is not None
    total, padded = batch.tokens.numel(), batch.cu_seqlens.numpy()
    starts = padded[: np.searchsorted(padded, total)].astype(np.int64)
    response = response_ids.numpy().ravel()[starts]
    prefix = np.where(response >= 0, lengths[np.maximum(response, 0)], 0)
    own = np.diff(starts, append=total)
    shift = np.cumsum(prefix)  # of a document's own tokens, when all are written out
    ends = np.cumsum(own) + shift
    written = np.concatenate([[0], ends])
    number = np.repeat(np.arange(len(starts)), own + prefix)
    offset = np.arange(ends[-1]) - written[number] - prefix[number]
    before = starts[number - 1] + offset + prefix[number]
    places = np.where(offset < 0, before, starts[number] + offset)
    cu_seqlens = np.full(len(padded), ends[-1], np.int32)
    cu_seqlens[: len(starts)] = written[:-1]
    prefixes = SharedPrefixes(
        torch.from_numpy(places),
        torch.from_numpy(np.arange(total) + np.repeat(shift, own)),
        torch.from_numpy(cu_seqlens),
        int((own + prefix).max()),
    )
    positions = batch.positions + torch.from_numpy(np.repeat(prefix, own)).view_as(batch.positions)
    return replace(batch, positions=positions, prefixes=prefixes)


def rechunk(batch: Batch, length: int) -> Batch:
    """Long rows read as more, shorter ones (`seq_curriculum`): the same tokens and labels in rows of
    `length`, which divides theirs: [batch * seq / length, length].

    Documents that go on over a new row's beginning begin there again, for attention and positions alike.
    """
    rows, seq = batch.tokens.shape
    if seq == length:
        return batch
    cuts = torch.arange(length)
    cut = batch.map(lambda tensor: tensor.reshape(-1, length) if tensor.shape == (rows, seq) else tensor)
    cut = replace(cut, loss_places=places_of_loss(cut.loss_weights.numpy()))
    if batch.filled is not None:
        filled = (batch.filled.unsqueeze(1) - torch.arange(0, seq, length)).clamp(0, length)
        cut = replace(cut, filled=filled.flatten())
    positions = None if cut.positions is None else torch.minimum(cut.positions, cuts)
    if batch.cu_seqlens is None:
        return replace(cut, positions=positions)
    begins = np.zeros(rows * seq + 1, bool)
    begins[batch.cu_seqlens.numpy()] = True
    starts, max_seqlen = document_starts(begins[:-1].reshape(-1, length))
    return replace(cut, positions=positions, cu_seqlens=torch.from_numpy(starts), max_seqlen=max_seqlen)


def places_of_loss(loss_weights: np.ndarray) -> Tensor | None:
    """`Batch.loss_places`: the places whose loss weight is 1, as numbers in the order of `[seq, batch]`, in
    which the model computes; then so many others that a shape of batch has eight sizes at most. None where
    they are more than three quarters of all.

    loss_weights: [batch, seq], 0 or 1.
    """
    flat = loss_weights.T.ravel()
    places = np.flatnonzero(flat)
    step = 1 << max(0, flat.size // 8 - 1).bit_length()
    size = max(1, -(-len(places) // step)) * step
    if 4 * size > 3 * flat.size:
        return None
    return torch.from_numpy(np.concatenate([places, np.flatnonzero(flat == 0)[: size - len(places)]]))


def document_starts(begins: np.ndarray) -> tuple[np.ndarray, int]:
    """`Batch.cu_seqlens` and `Batch.max_seqlen` from where documents begin, boolean [batch, seq].

    The starts of all documents of the micro-batch, its rows laid end to end, then batch * seq as often as
    makes the size n a power of two, at most batch * seq + 1: [n] int32. Kernels for documents reserve memory
    and start blocks for each of the n - 1; few sizes keep memory in one piece. Every row begins a document.
    """
    firsts = begins.copy()
    firsts[:, 0] = True
    places = np.flatnonzero(firsts)
    size = min(1 << len(places).bit_length(), begins.size + 1)
    starts = np.full(size, begins.size, dtype=np.int32)
    starts[: len(places)] = places
    return starts, int(np.diff(starts).max())


def _positions(begins: np.ndarray) -> np.ndarray:
    """Distance of every token from its document's start, [batch, seq] int64, from where documents begin."""
    places = np.arange(begins.shape[1])
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
