"""Rows of chat data -> documents: which columns make the conversation, its tokens, labels and reward, its length."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.errors import DataError
from megatron.data.labels import MASKED
from megatron.data.preprocessing.chat_masks import completion_labels, span_labels, trained_spans
from megatron.data.preprocessing.chat_tokenizer import (
    ChatTokenizer,
    Message,
    Span,
    check_characters,
    conversation,
    template_settings,
    texts_of,
)
from megatron.data.preprocessing.encode_job import fix_text

OVERLONG = ("refuse", "drop", "truncate_left", "truncate_right", "split")
UNTRAINED = ("refuse", "keep")
PROMPTED = ("completion", "chosen", "rejected")  # columns that continue the column `prompt`, where there is one
PAIR = ("chosen", "rejected")
SCOPES = ("completion", "all_assistant", "last_turn")


@dataclass(frozen=True)
class ChatOptions:
    """What to make of a row.

    keys: columns, each a document of its own. scope: one of SCOPES; None: completion after a prompt, else
    all_assistant. mask: label only what the model writes. for_rm: label only the last token. maps: (role, text with
    {column}) messages instead of a column. max_length: tokens; overlong: one of OVERLONG. untrained: of UNTRAINED.
    """

    keys: tuple[str, ...] = ("conversation",)
    role: str = "assistant"
    scope: str | None = None
    mask: bool = True
    for_rm: bool = False
    reward_key: str | None = None
    binary_reward: bool = False
    system: str | None = None
    maps: tuple[tuple[str, str], ...] = ()
    ftfy: bool = False
    max_length: int | None = None
    overlong: str = "refuse"
    untrained: str = "refuse"

    @property
    def only_last(self) -> bool:
        return self.scope == "last_turn"

    @property
    def all_turns(self) -> bool:
        return self.scope == "all_assistant"

    def check(self) -> None:
        """Raise DataError for what cannot be asked together."""
        several = len(self.keys) > 1 or self.reward_key is not None
        for wrong, message in (
            (self.binary_reward and self.reward_key is None, "--binary-reward needs --reward-key"),
            (self.for_rm and not self.mask, "--for-rm and --no-mask exclude each other"),
            (
                self.scope is not None and (self.for_rm or not self.mask),
                "--loss-scope and --only-last need a mask: no --for-rm, no --no-mask",
            ),
            (self.maps and len(self.keys) > 1, "--map makes one conversation a row; give one name in --jsonl-keys"),
            (self.max_length is not None and self.max_length < 2, "--max-length: at least 2 tokens"),
            (self.overlong != "refuse" and self.max_length is None, f"--overlong {self.overlong} needs --max-length"),
            (
                self.overlong == "split" and several,
                "--overlong split: several keys, or rewards, must stay side by side",
            ),
            (
                self.for_rm and self.overlong in ("truncate_right", "split"),
                f"--overlong {self.overlong} cuts off the last token, which --for-rm is about",
            ),
        ):
            if wrong:
                raise DataError(message)


@dataclass(frozen=True)
class Document:
    """ids [n] int32; labels [n] int32, not shifted, MASKED where not trained; None with --no-mask."""

    ids: np.ndarray
    labels: np.ndarray | None


@dataclass(frozen=True)
class Item:
    """One document to be tokenised: of a span-labelled conversation, of a prompt's completion, or all of it."""

    text: str
    prompt: str | None = None
    spans: tuple[Span, ...] | None = None
    special: bool = False  # plain text: the tokenizer adds its own special tokens
    eos: int | None = None  # added after the text, which ends in no token of the template's


@dataclass(frozen=True)
class Prepared:
    """A row's text for each key, its reward, what happened to it (to be counted), and its name for messages."""

    items: tuple[Item, ...]
    reward: float | None
    notes: Counter
    where: Callable[[], str]


@dataclass(frozen=True)
class ChatRow:
    """Documents of one row: per key, all lists of one length (several after a split); its reward."""

    documents: tuple[list[Document], ...]
    reward: float | None


def prepare(row: Any, chat: ChatTokenizer, options: ChatOptions, where: Callable[[], str] = lambda: "row") -> Prepared:
    """Render a row and find what of it is trained. Raises DataError, naming the row."""
    notes: Counter = Counter()
    try:
        if not isinstance(row, dict):
            raise DataError(f"a row is {type(row).__name__}, not an object with columns")
        if options.ftfy:
            row = _mended(row)
        items = tuple(_item(row, key, chat, options, notes) for key in options.keys)
        for item in items:
            check_characters(item.text + (item.prompt or ""))
            chat.one_bos(item.text, special=item.special)
            if not item.text:
                raise DataError("renders to no text")
        reward = None if options.reward_key is None else _reward(row, options)
    except DataError as problem:
        raise DataError(f"{where()}: {problem}") from None
    return Prepared(items, reward, notes, where)


def encode_rows(
    rows: Sequence[Prepared], chat: ChatTokenizer, options: ChatOptions
) -> tuple[list[ChatRow | None], Counter]:
    """The documents of rows, None for a row that is left out; and what happened, counted."""
    encoded = tokenize([item for row in rows for item in row.items], chat)
    counts: Counter = Counter()
    documents = []
    for row in rows:
        counts.update(row.notes)
        try:
            documents.append(_documents(row, encoded, chat, options, counts))
        except DataError as problem:
            raise DataError(f"{row.where()}: {problem}") from None
    return documents, counts


def _documents(
    row: Prepared, encoded: "Encoded", chat: ChatTokenizer, options: ChatOptions, counts: Counter
) -> ChatRow | None:
    documents = []
    for item, boundary in zip(row.items, _completions(row.items, encoded, options), strict=True):
        ids, ranges = encoded[item.text, item.special]
        labels = None
        if boundary is not None:
            labels = boundary
            prompt = encoded[str(item.prompt), item.special][0]
            if (labels[: len(prompt)] != MASKED).any():
                counts["prompts whose last tokens differ in the whole"] += 1
        elif item.spans is not None:
            labels = span_labels(ids, ranges, item.text, item.spans)
        if item.eos is not None:
            counts["conversations ended with the eos_token, as the template does not"] += 1
            ids = np.append(ids, np.int32(item.eos))
            if labels is not None:
                labels = np.append(labels, np.int32(item.eos if _trained_to_the_end(item) else MASKED))
        if options.for_rm:
            labels = np.where(np.arange(len(ids)) == len(ids) - 1, ids, MASKED).astype(np.int32)
        documents.append(Document(ids, labels))
    fitted = _fit(documents, chat.bos, options, counts)
    if fitted is None:
        return None
    if any(_untrained(document) for group in fitted for document in group):
        if options.untrained == "refuse":
            raise DataError("none of its tokens is trained; see --untrained, and --on-error skip to leave it out")
        counts["rows without a trained token"] += 1
    if set(PAIR) <= set(options.keys):
        chosen, rejected = (fitted[options.keys.index(side)][0].ids for side in PAIR)
        counts["pairs whose chosen and rejected are the same"] += np.array_equal(chosen, rejected)
    return ChatRow(fitted, row.reward)


Encoded = Mapping[tuple[str, bool], tuple[np.ndarray, np.ndarray]]


def tokenize(items: Sequence[Item], chat: ChatTokenizer) -> Encoded:
    """(ids, ranges) of every text in the items, each tokenised once, by (text, special)."""
    found: dict[tuple[str, bool], tuple[np.ndarray, np.ndarray]] = {}
    for special, ranges in ((False, False), (True, False), (False, True)):
        wanted = [item for item in items if (item.special, item.spans is not None) == (special, ranges)]
        texts = list(dict.fromkeys(text for item in wanted for text in (item.text, item.prompt) if text is not None))
        rows = chat.encode(texts, special=special, ranges=ranges)
        found.update({(text, special): row for text, row in zip(texts, rows, strict=True)})
    return found


def shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) without the beginning that two conversations, or two texts, share (as TRL 1.16)."""
    length = min(len(chosen), len(rejected))
    end = next((i for i in range(length) if chosen[i] != rejected[i]), length - 1)
    if 0 < end < length and chosen[end] != rejected[end] and chosen[end - 1] == " ":
        end -= 1  # the blank before a word belongs to the word
    if end < 1:
        raise DataError('"chosen" and "rejected" share no beginning to be their prompt; give a column "prompt"')
    return chosen[:end], chosen[end:], rejected[end:]


def _item(row: Mapping[str, Any], key: str, chat: ChatTokenizer, options: ChatOptions, counts: Counter) -> Item:
    prompt, rest = _parts(row, key, options, counts)
    if options.all_turns and isinstance(rest, str):
        raise DataError(f'"{key}" is plain text: --loss-scope all_assistant is for conversations')
    if options.scope == "completion" and prompt is None:
        raise DataError(f'"{key}" has no prompt before it: --loss-scope completion needs a column "prompt" or a pair')
    if isinstance(rest, str):
        return _plain(str(prompt), rest, chat, options)
    chat.need_template()
    tools, variables = template_settings(row)
    if options.all_turns:
        prompt, rest = None, [*(prompt if isinstance(prompt, list) else []), *rest]
    if prompt is None and options.mask and not options.for_rm:
        trained = trained_spans(
            chat, rest, role=options.role, only_last=options.only_last, tools=tools, variables=variables,
            unanswered=options.untrained == "keep",
        )  # fmt: skip
        start = trained.spans[-1][0] if trained.spans else 0
        item = Item(trained.text, spans=trained.spans, eos=_eos(trained.text[start:], rest, chat))
        closed = item.eos is not None and _trained_to_the_end(item)
        counts["answers without a stop token"] += trained.unstopped - closed
        return item
    before = prompt if isinstance(prompt, list) else []
    if options.only_last:
        before, rest = before + rest[:-1], rest[-1:]
    text = chat.render(before + rest, tools, variables)
    if prompt is None or not options.mask or options.for_rm:
        return Item(text, eos=_eos(text, rest, chat))
    others = sum(message["role"] != options.role for message in rest)
    if others == len(rest):
        if options.untrained == "keep":
            return Item(text, spans=(), eos=_eos(text, rest, chat))
        raise DataError(f'no message of "{key}" has the role "{options.role}"; see --generation-role')
    counts["turns of others trained, as they follow the prompt (see --loss-scope)"] += others
    asked = chat.render(before, tools, variables, generation_prompt=True)
    start = len(os.path.commonprefix([asked, text]))
    for number, message in enumerate(rest):
        for said in texts_of(message):
            if said.strip() not in text[start:]:
                raise DataError(f'"{key}" message {number} cannot be verified: the template does not render its text')
    return Item(text, prompt=asked, eos=_eos(text[start:], rest, chat))


def _parts(
    row: Mapping[str, Any], key: str, options: ChatOptions, counts: Counter
) -> tuple[list[Message] | str | None, list[Message] | str]:
    """(prompt or None, the rest) of one key: both texts, or both messages."""
    if options.maps:
        return None, _with_system([_mapped(row, role, text) for role, text in options.maps], options, counts)
    value = _column(row, key)
    prompt = row.get("prompt") if key in PROMPTED else None
    if isinstance(prompt, str) and not isinstance(value, str):
        prompt = question(prompt, conversation(value, key), key, options.role)
    implicit = key in PAIR and (prompt is None or isinstance(prompt, str) != isinstance(value, str))
    if implicit and all(side in row for side in PAIR):
        sides = [row[side] if isinstance(row[side], str) else conversation(row[side], side) for side in PAIR]
        if type(sides[0]) is not type(sides[1]):
            raise DataError('of "chosen" and "rejected" one is text and one is a conversation')
        if isinstance(value, str) or set(PAIR) <= set(options.keys):
            prompt, *both = shared_prompt(*sides)
            value = both[PAIR.index(key)]
        else:
            prompt = None
    if isinstance(value, str):
        if not isinstance(prompt, str):
            raise DataError(
                f'"{key}" is text, not a list of messages; plain text needs a column "prompt" beside it and the name '
                "completion, chosen or rejected"
            )
        if options.system is not None:
            raise DataError(f'"{key}" is plain text: --system-file is for conversations')
        return prompt, value
    messages = conversation(value, key)
    if prompt is None:
        return None, _with_system(messages, options, counts)
    asked = conversation(prompt, "prompt")
    if messages[: len(asked)] == asked:
        raise DataError(f'"{key}" begins with the messages of "prompt", which would be there twice; drop that column')
    return _with_system(asked, options, counts), messages


def question(prompt: str, messages: list[Message], key: str, role: str) -> list[Message] | None:
    """A text beside messages as the user's message; None where they begin with it (or with another, in pairs)."""
    first = next((message for message in messages if message["role"] != "system"), messages[0])
    held = first["role"] != role and (key in PAIR or prompt.strip() in map(str.strip, texts_of(first)))
    return None if held else [{"role": "user", "content": prompt}]


def _plain(prompt: str, rest: str, chat: ChatTokenizer, options: ChatOptions) -> Item:
    """Plain text is tokenised as one, and ends in the eos_token (as TRL)."""
    chat.need_eos()
    end = "" if rest.endswith(chat.hf.eos_token) else chat.hf.eos_token
    masked = options.mask and not options.for_rm
    return Item(prompt + rest + end, prompt=prompt if masked else None, special=True)


def _column(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        found = ", ".join(map(str, row))
        raise DataError(f'no key "{key}" (found: {found}); name the right one with --jsonl-keys')
    return row[key]


def _mapped(row: Mapping[str, Any], role: str, text: str) -> Message:
    try:
        filled = text.format_map({key: value for key, value in row.items() if value is not None})
    except KeyError as missing:
        raise DataError(f"--map {role}: no column {missing} (found: {', '.join(map(str, row))})") from None
    except (ValueError, IndexError, AttributeError, TypeError) as problem:
        raise DataError(f"--map {role}={text}: {problem}; braces hold column names, {{{{ and }}}} are braces") from None
    return {"role": role, "content": filled}


def _with_system(messages: list[Message], options: ChatOptions, counts: Counter) -> list[Message]:
    if options.system is None:
        return messages
    if messages[0]["role"] == "system":
        counts["conversations that keep a system message of their own"] += 1
        return messages
    return [{"role": "system", "content": options.system}, *messages]


def _eos(text: str, messages: Sequence[Message], chat: ChatTokenizer) -> int | None:
    """The token to add: none where the template ends the conversation itself (as TRL)."""
    return None if chat.ends_itself(text, messages[-1]) else chat.need_eos()


def _trained_to_the_end(item: Item) -> bool:
    return item.prompt is not None or bool(item.spans and not item.text[item.spans[-1][1] :].strip())


def _completions(items: Sequence[Item], encoded: Encoded, options: ChatOptions) -> list[np.ndarray | None]:
    """Labels of the items that complete a prompt; those of a pair begin at the same token."""
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


def _untrained(document: Document) -> bool:
    return document.labels is not None and bool((document.labels == MASKED).all())


def _fit(
    documents: list[Document], bos: int | None, options: ChatOptions, counts: Counter
) -> tuple[list[Document], ...] | None:
    """Each document as a list of pieces no longer than max_length; one that loses its beginning keeps its `bos`."""
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


def _cut(document: Document, part: slice | np.ndarray) -> Document:
    return Document(document.ids[part], None if document.labels is None else document.labels[part])


def _cut_left(document: Document, limit: int, bos: int | None) -> Document:
    size = len(document.ids)
    kept = np.arange(max(size - limit, 0), size)
    if size and document.ids[0] == bos:
        kept[0] = 0
    return _cut(document, kept)


def _reward(row: Mapping[str, Any], options: ChatOptions) -> float:
    key = str(options.reward_key)
    value = row.get(key)
    if options.binary_reward:
        if value not in (True, False, -1):
            raise DataError(f'"{key}" is {value!r}: --binary-reward reads true and false, 1 and 0, or 1 and -1')
        return 1.0 if value in (True,) else -1.0
    if isinstance(value, bool | int | float):
        reward = float(value)
        if math.isfinite(reward) and abs(reward) <= float(np.finfo(np.float32).max):
            return reward
    raise DataError(f'"{key}" is {"missing" if key not in row else repr(value)}: a reward is a finite number')


def _mended(value: Any) -> Any:
    """All text in a row, repaired by ftfy."""
    if isinstance(value, str):
        return fix_text(value)
    if isinstance(value, dict):
        return {key: _mended(item) for key, item in value.items()}
    return [_mended(item) for item in value] if isinstance(value, list) else value
