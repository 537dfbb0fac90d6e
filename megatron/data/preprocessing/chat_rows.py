"""Rows of chat data -> the text of each document, and what of it is trained."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.conversations import (
    PAIR,
    Message,
    conversation,
    is_trained,
    message_texts,
    row_system,
    template_settings,
    with_system,
)
from megatron.data.conversations.messages import check_characters, prompt_message, shared_prompt
from megatron.data.errors import DataError
from megatron.data.preprocessing.chat_masks import UNSTOPPED, trained_spans
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, Span
from megatron.data.preprocessing.encode_job import fix_text

PROMPTED = ("completion", *PAIR)  # columns that continue the column `prompt`, where there is one


@dataclass(frozen=True)
class TextToEncode:
    """One document to be tokenised. spans: the character ranges that are trained; prompt: the beginning that
    is not trained; without either, all of it is."""

    text: str
    prompt: str | None = None
    spans: tuple[Span, ...] | None = None
    special: bool = False  # plain text: the tokenizer adds its own special tokens
    eos: int | None = None  # added after the text, which ends in no token of the template's


@dataclass(frozen=True)
class PreparedRow:
    """A row with its text for each key. counts: what happened to it, by the words of the report; where: gives
    the name of the row in messages."""

    items: tuple[TextToEncode, ...]
    reward: float | None
    counts: Counter
    where: Callable[[], str]


def prepare(
    row: Any, chat: ChatTokenizer, options: ChatOptions, where: Callable[[], str] = lambda: "row"
) -> PreparedRow:
    """Render a row and find what of it is trained. Raises DataError, naming the row."""
    counts: Counter = Counter()
    try:
        if not isinstance(row, dict):
            raise DataError(f"a row is {type(row).__name__}, not an object with columns")
        if options.ftfy:
            row = _repaired(row)
        items = tuple(_item(row, key, chat, options, counts) for key in options.keys)
        for item in items:
            check_characters(item.text + (item.prompt or ""))
            chat.check_single_bos(item.text, special=item.special)
            if not item.text:
                raise DataError("renders to no text")
        reward = None if options.reward_key is None else _reward(row, options)
    except DataError as problem:
        raise DataError(f"{where()}: {problem}") from None
    return PreparedRow(items, reward, counts, where)


def _item(row: Mapping[str, Any], key: str, chat: ChatTokenizer, options: ChatOptions, counts: Counter) -> TextToEncode:
    """The text of one key of a row, and what of it is trained. Raises DataError for what cannot be
    verified."""
    prompt, rest = _parts(row, key, options, counts)
    if options.all_turns and isinstance(rest, str):
        raise DataError(f'"{key}" is plain text: --loss-scope all_assistant is for conversations')
    if options.scope == "completion" and prompt is None:
        raise DataError(f'"{key}" has no prompt before it: --loss-scope completion needs a column "prompt" or a pair')
    if isinstance(rest, str):
        return _plain(str(prompt), rest, chat, options)
    chat.require_template()
    tools, variables = template_settings(row)
    before = prompt if isinstance(prompt, list) else []
    if options.all_turns:
        prompt, before, rest = None, [], [*before, *rest]
    if prompt is None and options.mask and not options.for_rm:
        trained = trained_spans(
            chat, rest, role=options.role, only_last=options.only_last, tools=tools, variables=variables,
            unanswered=options.untrained == "keep",
        )  # fmt: skip
        start = trained.spans[-1][0] if trained.spans else 0
        item = TextToEncode(trained.text, spans=trained.spans, eos=_eos(trained.text[start:], rest, chat))
        closed = item.eos is not None and trained_to_the_end(item)
        counts.update(trained.counts)
        counts[UNSTOPPED] -= closed
        return item
    if options.only_last:
        before, rest = before + rest[:-1], rest[-1:]
    untrained = next((number for number, message in enumerate(rest) if not is_trained(message)), None)
    if untrained is not None and not options.for_rm:
        raise DataError(
            f'"{key}" message {untrained} is not to be trained (weight: 0), and all of "{key}" is; '
            "see --loss-scope all_assistant"
        )
    text = chat.render(before + rest, tools, variables)
    counts.update(chat.check_rendered(text, before + rest, tools, variables))
    if prompt is None or not options.mask or options.for_rm:
        return TextToEncode(text, eos=_eos(text, rest, chat))
    others = sum(message["role"] != options.role for message in rest)
    if others == len(rest):
        if options.untrained == "keep":
            return TextToEncode(text, spans=(), eos=_eos(text, rest, chat))
        raise DataError(f'no message of "{key}" has the role "{options.role}"; see --generation-role')
    counts["turns of others trained, as they follow the prompt (see --loss-scope)"] += others
    rendered_prompt = chat.render(before, tools, variables, generation_prompt=True)
    start = len(os.path.commonprefix([rendered_prompt, text]))
    for number, message in enumerate(rest):
        for part in message_texts(message):
            if part.strip() not in text[start:]:
                raise DataError(f'"{key}" message {number} cannot be verified: its text is not behind the prompt')
    return TextToEncode(text, prompt=rendered_prompt, eos=_eos(text[start:], rest, chat))


def _parts(
    row: Mapping[str, Any], key: str, options: ChatOptions, counts: Counter
) -> tuple[list[Message] | str | None, list[Message] | str]:
    """(prompt or None, what follows it) of one key: both are texts, or both are messages."""
    if options.maps:
        return None, _with_system([_mapped(row, role, text) for role, text in options.maps], row, options, counts)
    value = _column(row, key)
    prompt = row.get("prompt") if key in PROMPTED else None
    if isinstance(prompt, str) and not isinstance(value, str):
        prompt = prompt_message(prompt, conversation(value, key), key, options.role)
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
        return None, _with_system(messages, row, options, counts)
    prompt_messages = conversation(prompt, "prompt")
    if messages[: len(prompt_messages)] == prompt_messages:
        raise DataError(f'"{key}" begins with the messages of "prompt", which would be there twice; drop that column')
    return _with_system(prompt_messages, row, options, counts), messages


def _plain(prompt: str, rest: str, chat: ChatTokenizer, options: ChatOptions) -> TextToEncode:
    """Prompt and completion of plain text, tokenised as one, with the eos_token at the end (as TRL)."""
    chat.require_eos()
    end = "" if rest.endswith(chat.hf.eos_token) else chat.hf.eos_token
    masked = options.mask and not options.for_rm
    return TextToEncode(prompt + rest + end, prompt=prompt if masked else None, special=True)


def _column(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        present = ", ".join(map(str, row))
        raise DataError(f'no key "{key}" (found: {present}); name the right one with --jsonl-keys')
    return row[key]


def _mapped(row: Mapping[str, Any], role: str, text: str) -> Message:
    try:
        filled = text.format_map({key: value for key, value in row.items() if value is not None})
    except KeyError as missing:
        raise DataError(f"--map {role}: no column {missing} (found: {', '.join(map(str, row))})") from None
    except (ValueError, IndexError, AttributeError, TypeError) as problem:
        raise DataError(f"--map {role}={text}: {problem}; braces hold column names, {{{{ and }}}} are braces") from None
    return {"role": role, "content": filled}


def _with_system(
    messages: list[Message], row: Mapping[str, Any], options: ChatOptions, counts: Counter
) -> list[Message]:
    """Behind the system message of the row's column, else that of the job; one among the messages stays."""
    own = with_system(messages, None if options.maps else row_system(row))
    whole = with_system(own, options.system)
    counts["conversations that keep a system message of their own"] += options.system is not None and whole is own
    return whole


def _eos(text: str, messages: Sequence[Message], chat: ChatTokenizer) -> int | None:
    """The eos_token to add at the end; None where the template ends the conversation itself (as TRL)."""
    return None if chat.ends_with_stop_token(text, messages[-1]) else chat.require_eos()


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


def _repaired(value: Any) -> Any:
    """The value of a row with all text in it repaired by ftfy."""
    if isinstance(value, str):
        return fix_text(value)
    if isinstance(value, dict):
        return {key: _repaired(item) for key, item in value.items()}
    return [_repaired(item) for item in value] if isinstance(value, list) else value


def trained_to_the_end(item: TextToEncode) -> bool:
    """Whether the last character of a text that is no white space is trained."""
    return item.prompt is not None or bool(item.spans and not item.text[item.spans[-1][1] :].strip())
