"""Prepares samples for display: which text is trained, masked or padding, and where documents begin."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.data.errors import DataError
from megatron.data.index_maps import Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspection.file_groups import DOCUMENT, PAIR, FileGroup
from megatron.data.labels import open_labels, open_rewards
from megatron.data.open_dataset import open_tokens
from megatron.data.packed_dataset import PackedDataset
from megatron.data.packing import build_maps

KINDS = ("masked", "trained", "padding")  # of a position in a sample; DisplayedPart.kinds holds indices of these
MASKED, TRAINED, PADDING = range(3)
CONTEXT = 4  # tokens before a span that are decoded with it, because its text may depend on them


class Decoder(Protocol):
    """The part of a tokenizer's interface that is needed to show samples."""

    vocab_size: int

    @property
    def special_tokens(self) -> Mapping[int, str]: ...
    def detokenize(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True, eq=False)
class DisplayedPart:
    """The tokens of one document in a sample, or the sample's padding."""

    name: str
    tokens: np.ndarray  # [n] ids
    kinds: np.ndarray  # [n] indices into KINDS


@dataclass(frozen=True, eq=False)
class DisplayedSample:
    """A sample prepared for display.

    name: the side of a preference pair (chosen or rejected), else empty. reward: None if the data has no
      rewards.
    """

    title: str
    name: str
    parts: tuple[DisplayedPart, ...]
    reward: float | None = None

    def count(self, kind: int) -> int:
        return sum(int((part.kinds == kind).sum()) for part in self.parts)


@dataclass(frozen=True)
class TextSpan:
    """Consecutive text of one kind (masked, trained or padding).

    special: True if the text is the name of a special token. start: position of its first token. tokens: how
      many tokens it has.
    """

    text: str
    kind: str
    special: bool
    start: int
    tokens: int


class StoredDocuments:
    """A dataset of full documents for display: item i is a list with document i of each file group.

    A preference pair has several file groups, other data one.
    """

    def __init__(self, file_groups: Sequence[FileGroup]):
        texts = [open_tokens(group.text) for group in file_groups]
        self._files = [(group, text, *_companions(group, text)) for group, text in zip(file_groups, texts, strict=True)]
        counts = {len(text.doc_idx) - 1 for text in texts}
        if len(counts) > 1:
            names = ", ".join(f"{text.index_file} {len(text.doc_idx) - 1}" for text in texts)
            raise DataError(
                f"the files of a pair hold different numbers of documents: {names}; make them again in one "
                "preprocessing run"
            )
        self._count = counts.pop()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> list[DisplayedSample]:
        samples, title = [], f"document {index}"
        for group, text, labels, rewards in self._files:
            begin, end = map(int, text.doc_idx[index : index + 2])
            tokens = np.asarray(text.span(begin, end))
            trained = np.ones(len(tokens), bool) if labels is None else labels.span(begin, end) >= 0
            parts = (DisplayedPart(title, tokens, np.where(trained, TRAINED, MASKED)),)
            reward = None if rewards is None or end == begin else float(rewards.get(begin, 0, 1)[0])
            samples.append(DisplayedSample(title, group.name if len(self._files) > 1 else "", parts, reward))
        return samples


class PackedRows:
    """A dataset of training samples for display: item i is a list that holds sample i as training sees it.

    A sample has seq_length + 1 tokens; the last is only predicted. The first token is never trained, because
    no token precedes it.
    """

    def __init__(self, group: FileGroup, seq_length: int, pack_impl: str, seed: int):
        text = open_tokens(group.text)
        if not len(text):
            raise DataError(f"{text.index_file}: it holds no documents, so there is nothing to show")
        packing, (labels, rewards) = Packing(pack_impl=pack_impl), _companions(group, text)
        maps = build_maps(text.sizes, 0, len(text), 1, seq_length, seed, packing, labels)
        self._set = PackedDataset(text, maps, seq_length, packing=packing, labels=labels, rewards=rewards)

    def __len__(self) -> int:
        return len(self._set)

    def __getitem__(self, index: int) -> list[DisplayedSample]:
        sample, parts, filled = self._set[index], [], 0
        kinds = np.where(sample.labels >= 0, TRAINED, MASKED)
        kinds[0] = MASKED
        for document, offset, count in self._set.pieces(index):
            places = slice(filled, filled + count)
            name = f"document {document}" + (f" from its token {offset}" if offset else "")
            parts.append(DisplayedPart(name, sample.tokens[places], kinds[places]))
            filled += count
        num_padding = len(sample.tokens) - filled
        if num_padding:
            parts.append(DisplayedPart("padding", sample.tokens[filled:], np.full(num_padding, PADDING)))
        return [DisplayedSample(f"sample {index}", "", tuple(parts), sample.reward)]


def _companions(group: FileGroup, text: IndexedDataset) -> tuple[IndexedDataset | None, IndexedDataset | None]:
    """Open and return the labels and the rewards of a text; None for those that it does not have."""
    labels = None if group.label is None else open_labels(group.label, text)
    return labels, None if group.reward is None else open_rewards(group.reward, text)


def group_pairs(file_groups: Sequence[FileGroup]) -> list[list[FileGroup]]:
    """Return the file groups as lists: all groups of a preference pair in one list, every other group in
    its own list."""
    groups: dict[str, list[FileGroup]] = {}
    for group in file_groups:
        base = group.text.removesuffix(group.name + DOCUMENT) if group.name in PAIR else group.text
        groups.setdefault(base, []).append(group)
    return list(groups.values())


def text_spans(part: DisplayedPart, tokenizer: Decoder) -> Iterator[TextSpan]:
    """Yield the text of a part as spans, split where the kind changes and around special tokens.

    Padding is one span without text.
    """
    ids = part.tokens.tolist()
    if part.name == "padding":
        yield TextSpan("", KINDS[PADDING], False, 0, len(ids))
        return
    names = [_name(i, tokenizer) for i in ids]
    start = text_start = 0  # text_start: the first token after the last special token
    for end in range(1, len(ids) + 1):
        goes_on = end < len(ids) and names[start] is None and names[end] is None
        if goes_on and part.kinds[end] == part.kinds[start]:
            continue
        name = names[start]
        text = _text(ids[max(text_start, start - CONTEXT) : start], ids[start:end], tokenizer) if name is None else name
        yield TextSpan(text, KINDS[part.kinds[start]], name is not None, start, end - start)
        text_start = text_start if name is None else end
        start = end


def _name(token: int, tokenizer: Decoder) -> str | None:
    if not 0 <= token < tokenizer.vocab_size:
        return f"<{token}: not in the vocabulary>"
    return tokenizer.special_tokens.get(token)


def _text(context: list[int], ids: list[int], tokenizer: Decoder) -> str:
    """Return the text of `ids`.

    context: the ids before them, which are decoded too, because some tokenizers drop a leading space.
    """
    head, full_text = tokenizer.detokenize(context), tokenizer.detokenize([*context, *ids])
    if not context or head.endswith("\ufffd") or not full_text.startswith(head):
        return tokenizer.detokenize(ids)
    return full_text[len(head) :]
