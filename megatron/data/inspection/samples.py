"""Samples as people look at them: which text is trained, masked or padding, and where documents begin."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.data.errors import DataError
from megatron.data.index_maps import Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspection.file_groups import DOCUMENT, PAIR, FileGroup
from megatron.data.labels import open_labels, open_rewards
from megatron.data.open_dataset import open_dataset
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import build_maps

KINDS = ("masked", "trained", "padding")  # of a place in a sample; indices of DisplayedPart.kinds
MASKED, TRAINED, PADDING = range(3)
CONTEXT = 4  # tokens before a run that its text may depend on


class Decoder(Protocol):
    """The part of a tokenizer that is needed to show samples."""

    vocab_size: int

    @property
    def special_tokens(self) -> Mapping[int, str]: ...
    def detokenize(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True, eq=False)
class DisplayedPart:
    """A stretch of one document, or the padding, in a sample. first: the position of its first token."""

    name: str
    tokens: np.ndarray  # [n] ids
    kinds: np.ndarray  # [n] indices into KINDS
    first: int = 0


@dataclass(frozen=True, eq=False)
class DisplayedSample:
    """One sample as it is shown. name: which side of a pair, else empty; reward: None without rewards."""

    title: str
    name: str
    parts: tuple[DisplayedPart, ...]
    reward: float | None = None

    def count(self, kind: int) -> int:
        return sum(int((part.kinds == kind).sum()) for part in self.parts)


@dataclass(frozen=True)
class TextSpan:
    """Text of one kind. special: whether it is the name of a special token; first: position of its first
    token."""

    text: str
    kind: str
    special: bool
    first: int
    tokens: int


class StoredDocuments:
    """Item i: document i of each file group as it is stored, one sample for each group; several groups are a
    pair."""

    def __init__(self, file_groups: Sequence[FileGroup]):
        self.file_groups = file_groups
        self._texts = [open_dataset(group.text) for group in file_groups]
        self._labels = [_labels(*of) for of in zip(file_groups, self._texts, strict=True)]
        self._rewards = [_rewards(*of) for of in zip(file_groups, self._texts, strict=True)]
        counts = {len(text.doc_idx) - 1 for text in self._texts}
        if len(counts) > 1:
            names = ", ".join(f"{text.index_file} {len(text.doc_idx) - 1}" for text in self._texts)
            raise DataError(f"a pair's files hold different numbers of documents: {names}; make them again in one go")
        self._count = counts.pop()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> list[DisplayedSample]:
        return [self._sample(place, index) for place in range(len(self.file_groups))]

    def _sample(self, place: int, index: int) -> DisplayedSample:
        text, labels, rewards = self._texts[place], self._labels[place], self._rewards[place]
        first, last = map(int, text.doc_idx[index : index + 2])
        tokens = np.asarray(text.span(first, last))
        trained = np.ones(len(tokens), bool) if labels is None else labels.span(first, last) >= 0
        name = self.file_groups[place].name if len(self.file_groups) > 1 else ""
        parts = (DisplayedPart(f"document {index}", tokens, np.where(trained, TRAINED, MASKED)),)
        reward = None if rewards is None or last == first else float(rewards.get(first, 0, 1)[0])
        return DisplayedSample(f"document {index}", name, parts, reward)


class PackedRows:
    """Item i: a list of one, sample i as training sees it: seq_length tokens, and one that is only predicted.

    The first place is never trained: nothing stands before it.
    """

    def __init__(self, group: FileGroup, seq_length: int, pack_impl: str, seed: int):
        text = open_dataset(group.text)
        if not len(text):
            raise DataError(f"{text.index_file}: no documents")
        packing, labels = Packing(pack_impl=pack_impl), _labels(group, text)
        maps = build_maps(text.sizes, 0, len(text), 1, seq_length, seed, packing, labels)
        rewards = _rewards(group, text)
        self._set = PackedDataset("set", text, maps, seq_length, packing=packing, labels=labels, rewards=rewards)

    def __len__(self) -> int:
        return len(self._set)

    def __getitem__(self, index: int) -> list[DisplayedSample]:
        sample, parts, filled = self._set[index], [], 0
        kinds = np.where(sample.labels >= 0, TRAINED, MASKED)
        kinds[0] = MASKED
        for document, offset, count in self._set.pieces(index):
            of = slice(filled, filled + count)
            name = f"document {document}" + (f" from its token {offset}" if offset else "")
            parts.append(DisplayedPart(name, sample.tokens[of], kinds[of]))
            filled += count
        rest = len(sample.tokens) - filled
        if rest:
            parts.append(DisplayedPart("padding", sample.tokens[filled:], np.full(rest, PADDING)))
        return [DisplayedSample(f"sample {index}", "", tuple(parts), sample.reward)]


def _labels(group: FileGroup, text: IndexedDataset) -> IndexedDataset | None:
    return None if group.label is None else open_labels(group.label, text)


def _rewards(group: FileGroup, text: IndexedDataset) -> IndexedDataset | None:
    return None if group.reward is None else open_rewards(group.reward, text)


def group_pairs(file_groups: Sequence[FileGroup]) -> list[list[FileGroup]]:
    """The file groups, those of a pair together."""
    groups: dict[str, list[FileGroup]] = {}
    for group in file_groups:
        base = group.text.removesuffix(group.name + DOCUMENT) if group.name in PAIR else group.text
        groups.setdefault(base, []).append(group)
    return list(groups.values())


def text_spans(part: DisplayedPart, tokenizer: Decoder) -> Iterator[TextSpan]:
    """The text of a part, cut where the kind changes and around special tokens. Padding is one span without
    text."""
    ids = part.tokens.tolist()
    if part.name == "padding":
        yield TextSpan("", KINDS[PADDING], False, part.first, len(ids))
        return
    names = [_name(i, tokenizer) for i in ids]
    start = plain = 0  # plain: where the text since the last special token begins
    for end in range(1, len(ids) + 1):
        goes_on = end < len(ids) and names[start] is None and names[end] is None
        if goes_on and part.kinds[end] == part.kinds[start]:
            continue
        name = names[start]
        text = _text(ids[max(plain, start - CONTEXT) : start], ids[start:end], tokenizer) if name is None else name
        yield TextSpan(text, KINDS[part.kinds[start]], name is not None, part.first + start, end - start)
        plain = plain if name is None else end
        start = end


def _name(token: int, tokenizer: Decoder) -> str | None:
    if not 0 <= token < tokenizer.vocab_size:
        return f"<{token}: not in the vocabulary>"
    return tokenizer.special_tokens.get(token)


def _text(before: list[int], ids: list[int], tokenizer: Decoder) -> str:
    """Text of ids, with the blank that some tokenizers drop at the beginning of what they decode."""
    head, whole = tokenizer.detokenize(before), tokenizer.detokenize([*before, *ids])
    if not before or head.endswith("\ufffd") or not whole.startswith(head):
        return tokenizer.detokenize(ids)
    return whole[len(head) :]
