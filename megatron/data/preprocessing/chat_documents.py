"""Prepared rows of chat data -> documents: their tokens and labels, cut to a length."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.conversations.messages import PAIR
from megatron.data.errors import DataError
from megatron.data.labels import MASKED
from megatron.data.preprocessing.chat_masks import completion_labels, span_labels
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_rows import PreparedRow, TextToEncode, trained_to_the_end
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True)
class LabelledDocument:
    """The tokens of one document. ids [n] int32; labels [n] int32, not shifted, MASKED where not trained;
    None with --no-mask."""

    ids: np.ndarray
    labels: np.ndarray | None


@dataclass(frozen=True)
class ChatDocuments:
    """The documents of one row: a list for each key, all of one length (several after a split); and its
    reward."""

    documents: tuple[list[LabelledDocument], ...]
    reward: float | None


# (text, whether the tokenizer adds its own special tokens) -> (ids, character ranges), as of
# `ChatTokenizer.encode`.
Encoded = Mapping[tuple[str, bool], tuple[np.ndarray, np.ndarray]]


def tokenize(items: Sequence[TextToEncode], chat: ChatTokenizer) -> Encoded:
    """The tokens of all texts and prompts in the items, each tokenised once."""
    encoded: dict[tuple[str, bool], tuple[np.ndarray, np.ndarray]] = {}
    for special, ranges in ((False, False), (True, False), (False, True)):
        wanted = [item for item in items if (item.special, item.spans is not None) == (special, ranges)]
        texts = list(dict.fromkeys(text for item in wanted for text in (item.text, item.prompt) if text is not None))
        rows = chat.encode(texts, special=special, ranges=ranges)
        encoded.update({(text, special): row for text, row in zip(texts, rows, strict=True)})
    return encoded


def encode_rows(
    rows: Sequence[PreparedRow], chat: ChatTokenizer, options: ChatOptions
) -> tuple[list[ChatDocuments | None], Counter]:
    """(documents of each row, None for one that is left out; what happened, counted by the words of the
    report).

    Raises DataError, naming the row, for a row that cannot be used.
    """
    encoded = tokenize([item for row in rows for item in row.items], chat)
    counts: Counter = Counter()
    documents = []
    for row in rows:
        counts.update(row.counts)
        try:
            documents.append(_documents(row, encoded, chat, options, counts))
        except DataError as problem:
            raise DataError(f"{row.where()}: {problem}") from None
    return documents, counts


def _documents(
    row: PreparedRow, encoded: Encoded, chat: ChatTokenizer, options: ChatOptions, counts: Counter
) -> ChatDocuments | None:
    """The documents of one row, None where nothing of it is left."""
    documents = []
    for item, after_prompt in zip(row.items, _completions(row.items, encoded, options), strict=True):
        ids, ranges = encoded[item.text, item.special]
        labels = None
        if after_prompt is not None:
            labels = after_prompt
            prompt = encoded[str(item.prompt), item.special][0]
            if (labels[: len(prompt)] != MASKED).any():
                counts["prompts whose last tokens differ in the whole"] += 1
        elif item.spans is not None:
            labels = span_labels(ids, ranges, item.text, item.spans)
        if item.eos is not None:
            counts["conversations ended with the eos_token, as the template does not"] += 1
            ids = np.append(ids, np.int32(item.eos))
            if labels is not None:
                labels = np.append(labels, np.int32(item.eos if trained_to_the_end(item) else MASKED))
        if options.for_rm:
            labels = np.where(np.arange(len(ids)) == len(ids) - 1, ids, MASKED).astype(np.int32)
        documents.append(LabelledDocument(ids, labels))
    fitted = _fit(documents, chat.bos, options, counts)
    if fitted is None:
        return None
    if any(_untrained(document) for group in fitted for document in group):
        if options.untrained == "refuse":
            raise DataError("none of its tokens is trained; see --untrained")
        counts["rows without a trained token"] += 1
    if set(PAIR) <= set(options.keys):
        chosen, rejected = (fitted[options.keys.index(side)][0].ids for side in PAIR)
        counts["pairs whose chosen and rejected are the same"] += np.array_equal(chosen, rejected)
    return ChatDocuments(fitted, row.reward)


def _completions(items: Sequence[TextToEncode], encoded: Encoded, options: ChatOptions) -> list[np.ndarray | None]:
    """Labels of the items that complete a prompt, None for the others; those of a pair begin at the same
    token."""
    labels: list[np.ndarray | None] = [None] * len(items)
    groups = [[i] for i, item in enumerate(items) if item.prompt is not None]
    if set(PAIR) <= set(options.keys) and not options.only_last:
        pair = [options.keys.index(side) for side in PAIR]
        groups = [group for group in groups if group[0] not in pair]
        groups += [pair] if all(items[i].prompt is not None for i in pair) else []
    for group in groups:
        prompts = [encoded[str(items[i].prompt), items[i].special][0] for i in group]
        wholes = [encoded[items[i].text, items[i].special][0] for i in group]
        for i, row in zip(group, completion_labels(prompts, wholes), strict=True):
            labels[i] = row
    return labels


def _untrained(document: LabelledDocument) -> bool:
    return document.labels is not None and bool((document.labels == MASKED).all())


def _fit(
    documents: list[LabelledDocument], bos: int | None, options: ChatOptions, counts: Counter
) -> tuple[list[LabelledDocument], ...] | None:
    """Each document as a list of pieces no longer than max_length, None where the row is left out.

    A document that loses its beginning keeps its token `bos`. Raises DataError with `overlong: refuse`.
    """
    limit = options.max_length
    longest = max(len(document.ids) for document in documents)
    if limit is None or longest <= limit:
        return tuple([document] for document in documents)
    if options.overlong == "refuse":
        raise DataError(f"{longest} tokens, more than --max-length {limit}; see --overlong")
    done = {"drop": "dropped", "split": "split"}.get(options.overlong, "truncated")
    counts[f"over-long rows {done}"] += 1
    if options.overlong == "drop":
        return None
    if options.overlong == "split":
        pieces = [_cut(documents[0], slice(start, start + limit)) for start in range(0, longest, limit)]
        kept = [piece for piece in pieces if not _untrained(piece)]
        counts["pieces left out, as nothing in them is trained"] += len(pieces) - len(kept)
        return (kept,) if kept else None
    left = options.overlong == "truncate_left"
    cut = [_cut_left(document, limit, bos) if left else _cut(document, slice(limit)) for document in documents]
    if any(_untrained(short) and not _untrained(long) for short, long in zip(cut, documents, strict=True)):
        counts["over-long rows left out, as nothing in the rest is trained"] += 1
        return None
    return tuple([document] for document in cut)


def _cut(document: LabelledDocument, part: slice | np.ndarray) -> LabelledDocument:
    return LabelledDocument(document.ids[part], None if document.labels is None else document.labels[part])


def _cut_left(document: LabelledDocument, limit: int, bos: int | None) -> LabelledDocument:
    size = len(document.ids)
    kept = np.arange(max(size - limit, 0), size)
    if size and document.ids[0] == bos:
        kept[0] = 0
    return _cut(document, kept)
