"""Defines preprocessing jobs that also write labels: conversations, and text whose beginning is masked."""

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from typing import Any

import numpy as np

from megatron.data.conversations.messages import UNREAD_COLUMNS
from megatron.data.preprocessing.chat_documents import encode_rows
from megatron.data.preprocessing.chat_masks import delimiter_labels
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_rows import PreparedRow, prepare
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from megatron.data.preprocessing.encode_job import EncodeJob, JoinedDocuments, join_documents
from megatron.data.preprocessing.shards import InputRow

TRAINED = "trained tokens"  # its name among the counts of a job
INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True)
class ChatJob:
    """A job that writes the tokens, labels and rewards of conversations, rendered by the tokenizer's chat
    template.

    The files are as in NeoX: all int32, except float32 rewards. day: the ISO date that templates take for
      today.
    """

    tokenizer_path: str
    options: ChatOptions
    day: str
    template_file: str | None = None

    @property
    def fields(self) -> None:
        return None

    def tokenizer(self) -> ChatTokenizer:
        return _build(self.tokenizer_path, self.template_file, self.day)

    def names(self) -> list[str]:
        """Return, for each output, the end of its file name after the output prefix, such as
        `messages_label_document`."""
        extra = {"label_document": self.options.mask, "reward_document": self.options.reward_key}
        kinds = ["document", *(kind for kind, is_written in extra.items() if is_written)]
        return [f"{key}_{kind}" for key in self.options.keys for kind in kinds]

    def dtypes(self) -> tuple[np.dtype, ...]:
        return tuple(FLOAT32 if name.endswith("reward_document") else INT32 for name in self.names())

    def notes(self, columns: Collection[str]) -> list[str]:
        read = (*self.options.keys, self.options.reward_key)
        unread = [name for name in UNREAD_COLUMNS if name in columns and name not in read]
        return [f"columns that are not read: {', '.join(unread)}"] if unread else []

    def prepare(self, row: InputRow) -> PreparedRow:
        return prepare(row.value(), self.tokenizer(), self.options, row.location)

    def encode(self, prepared: Sequence[PreparedRow]) -> tuple[list[JoinedDocuments], dict[str, int]]:
        rows, counts = encode_rows(prepared, self.tokenizer(), self.options)
        retained = [row for row in rows if row is not None]
        columns = []
        for key in range(len(self.options.keys)):
            documents = list(chain.from_iterable(row.documents[key] for row in retained))
            columns.append(join_documents([document.ids for document in documents], INT32))
            if self.options.mask:
                labels = [document.labels for document in documents if document.labels is not None]
                columns.append(join_documents(labels, INT32))
                counts[TRAINED] += sum(int((row >= 0).sum()) for row in labels)
            if self.options.reward_key:
                columns.append(join_documents([np.array([row.reward], FLOAT32) for row in retained], FLOAT32))
        return columns, dict(counts)

    def describe(self) -> dict[str, Any]:
        chat = self.tokenizer()
        template = chat.hf.chat_template
        return {
            "tokenizer": {
                "type": "chat",
                "files": [self.tokenizer_path, *[self.template_file] * bool(self.template_file)],
                "vocab_size": len(chat.hf),
                "sha256": chat.fingerprint(),
                "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest(),
            },
            # None: the template does not use the date
            "template_date": chat.date and chat.date.isoformat(),
            "chat": dataclasses.asdict(self.options),
        }


@dataclass(frozen=True)
class DelimiterJob:
    """A job for plain text whose labels are masked up to and including the first `delimiter` (token ids).

    All files are int32, as in NeoX. A document without the delimiter is trained in full, as in NeoX, and
    counted.
    """

    text: EncodeJob
    delimiter: tuple[int, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return self.text.fields

    def notes(self, columns: Collection[str]) -> list[str]:
        return []

    def dtypes(self) -> tuple[np.dtype, ...]:
        return (INT32, INT32)

    def prepare(self, row: InputRow) -> tuple[str, ...] | None:
        return self.text.prepare(row)

    def encode(self, prepared: Sequence[tuple[str, ...]]) -> tuple[list[JoinedDocuments], dict[str, int]]:
        columns, counts = self.text.encode(prepared)
        ((ids, lengths),) = columns
        rows = np.split(ids.astype(INT32), np.cumsum(lengths)[:-1]) if len(lengths) else []
        masked = [delimiter_labels(row, self.delimiter) for row in rows]
        labels = join_documents([labels for labels, _ in masked], INT32)
        counts = {
            **counts,
            TRAINED: int((labels[0] >= 0).sum()),
            "documents without the delimiter": sum(not has_delimiter for _, has_delimiter in masked),
        }
        return [(ids.astype(INT32), lengths), labels], counts

    def describe(self) -> dict[str, Any]:
        return self.text.describe() | {"mask_before_token": list(self.delimiter)}


@functools.lru_cache(maxsize=1)
def _build(path: str, template_file: str | None, day: str) -> ChatTokenizer:
    return load_chat_tokenizer(path, template_file, date.fromisoformat(day))
