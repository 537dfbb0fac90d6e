"""Turns prepared rows of chat data into documents: tokens and labels, truncated to a length."""

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
    """The tokens of one document, with labels.

    ids: [n] int32.
    labels: [n] int32, not shifted, MASKED where not trained; None: all tokens are trained (--no-mask).
    """

    ids: np.ndarray
    labels: np.ndarray | None


@dataclass(frozen=True)
class ChatDocuments:
    """The documents and the reward of one row.

    documents: for each key, a list of documents. The lists of all keys have the same length, which is above 1
      only after `overlong: split`.
    """

    documents: tuple[list[LabelledDocument], ...]
    reward: float | None


# (text, whether the tokenizer adds its own special tokens) -> (ids, character range of each token), from
# `ChatTokenizer.encode`.
Encoded = Mapping[tuple[str, bool], tuple[np.ndarray, np.ndarray]]


def tokenize(items: Sequence[TextToEncode], chat: ChatTokenizer) -> Encoded:
    """Tokenise all texts and prompts of the items, each once; the result is described at `Encoded`."""
    encoded: dict[tuple[str, bool], tuple[np.ndarray, np.ndarray]] = {}
    for special, ranges in ((False, False), (True, False), (False, True)):
        selected = [item for item in items if (item.special, item.spans is not None) == (special, ranges)]
        texts = list(dict.fromkeys(text for item in selected for text in (item.text, item.prompt) if text is not None))
        rows = chat.encode(texts, special=special, ranges=ranges)
        encoded.update({(text, special): row for text, row in zip(texts, rows, strict=True)})
    return encoded


def encode_rows(
    rows: Sequence[PreparedRow], chat: ChatTokenizer, options: ChatOptions
) -> tuple[list[ChatDocuments | None], Counter]:
    """Return (the documents of each row, None if the row is dropped; counts of events by their names in the
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
            raise DataError(f"{row.location()}: {problem}") from None
    return documents, counts


def _documents(
    row: PreparedRow, encoded: Encoded, chat: ChatTokenizer, options: ChatOptions, counts: Counter
) -> ChatDocuments | None:
    """Return the documents of one row; None if they are too long and are dropped, or have no trained token
    left.

    Adds events to `counts`. Raises DataError for a row without a trained token, unless `untrained` allows it.
    """
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
            raise DataError("none of its tokens is trained; mend the row, or keep it with --untrained keep")
        counts["rows without a trained token"] += 1
    if set(PAIR) <= set(options.keys):
        chosen, rejected = (fitted[options.keys.index(side)][0].ids for side in PAIR)
        counts["pairs whose chosen and rejected are the same"] += np.array_equal(chosen, rejected)
    return ChatDocuments(fitted, row.reward)


def _completions(items: Sequence[TextToEncode], encoded: Encoded, options: ChatOptions) -> list[np.ndarray | None]:
    """Return, for each item, the labels of its text if it has a prompt, else None.

    The labels of chosen and rejected begin at the same token.
    """
    labels: list[np.ndarray | None] = [None] * len(items)
    groups = [[i] for i, item in enumerate(items) if item.prompt is not None]
    if set(PAIR) <= set(options.keys) and options.scope != "last_turn":
        pair = [options.keys.index(side) for side in PAIR]
        groups = [group for group in groups if group[0] not in pair]
        groups += [pair] if all(items[i].prompt is not None for i in pair) else []
    for group in groups:
        prompts = [encoded[str(items[i].prompt), items[i].special][0] for i in group]
        full_rows = [encoded[items[i].text, items[i].special][0] for i in group]
        for i, row in zip(group, completion_labels(prompts, full_rows), strict=True):
            labels[i] = row
    return labels


def _untrained(document: LabelledDocument) -> bool:
    return document.labels is not None and bool((document.labels == MASKED).all())


def _fit(
    documents: list[LabelledDocument], bos: int | None, options: ChatOptions, counts: Counter
) -> tuple[list[LabelledDocument], ...] | None:
    """Return each document as a list of pieces of at most max_length tokens; None if the row is dropped.

    A document that `truncate_left` shortens keeps its first token if that is `bos`. If `overlong` is refuse,
    a longer document raises DataError.
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
        pieces = [_take(documents[0], slice(start, start + limit)) for start in range(0, longest, limit)]
        retained = [piece for piece in pieces if not _untrained(piece)]
        counts["pieces left out, as nothing in them is trained"] += len(pieces) - len(retained)
        return (retained,) if retained else None
    left = options.overlong == "truncate_left"
    truncated = [
        _truncate_left(document, limit, bos) if left else _take(document, slice(limit)) for document in documents
    ]
    if any(_untrained(short) and not _untrained(long) for short, long in zip(truncated, documents, strict=True)):
        counts["over-long rows left out, as nothing in the rest is trained"] += 1
        return None
    return tuple([document] for document in truncated)


def _take(document: LabelledDocument, part: slice | np.ndarray) -> LabelledDocument:
    return LabelledDocument(document.ids[part], None if document.labels is None else document.labels[part])


def _truncate_left(document: LabelledDocument, limit: int, bos: int | None) -> LabelledDocument:
    size = len(document.ids)
    indices = np.arange(max(size - limit, 0), size)
    if size and document.ids[0] == bos:
        indices[0] = 0
    return _take(document, indices)
