"""Turns rows of chat data into the text of each document, and finds the part of it that is trained."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.conversations.messages import (
    PAIR,
    Message,
    check_characters,
    conversation,
    is_trained,
    message_texts,
    prompt_message,
    row_system,
    shared_prompt,
    template_settings,
    with_system,
)
from megatron.data.errors import DataError
from megatron.data.preprocessing.chat_masks import UNSTOPPED, trained_spans
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, Span
from megatron.data.preprocessing.encode_job import fix_text
from megatron.neox_arguments.values.integers import finite_float

PROMPTED = ("completion", *PAIR)  # columns that continue the column `prompt`, if the row has one


@dataclass(frozen=True)
class TextToEncode:
    """The text of a document that is to be tokenised, and which part of it is trained.

    spans: the ranges of characters that are trained.
    prompt: the beginning of the text, which is not trained.
    Without spans and prompt, the full text is trained.
    """

    text: str
    prompt: str | None = None
    spans: tuple[Span, ...] | None = None
    special: bool = False  # plain text: the tokenizer adds its own special tokens
    eos: int | None = None  # id to add at the end, if the template writes no stop token there


@dataclass(frozen=True)
class PreparedRow:
    """A row of chat data with its rendered text for each key.

    items: the text of each key.
    counts: counts of events, by their names in the report.
    location: returns the name of the row for messages.
    """

    items: tuple[TextToEncode, ...]
    reward: float | None
    counts: Counter
    location: Callable[[], str]


def prepare(
    row: Any, chat: ChatTokenizer, options: ChatOptions, location: Callable[[], str] = lambda: "row"
) -> PreparedRow:
    """Render a row of chat data and find its trained part. Raises DataError, naming the row, if it cannot be
    used.

    location: returns the name of the row for messages.
    """
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
                raise DataError("its text is empty; remove the row")
        reward = None if options.reward_key is None else _reward(row, options)
    except DataError as problem:
        raise DataError(f"{location()}: {problem}") from None
    return PreparedRow(items, reward, counts, location)


def _item(row: Mapping[str, Any], key: str, chat: ChatTokenizer, options: ChatOptions, counts: Counter) -> TextToEncode:
    """Return the text of one key of a row, with its trained part.

    Raises DataError if the trained part cannot be verified.
    """
    prompt, completion = _parts(row, key, options, counts)
    if options.scope == "all_assistant" and isinstance(completion, str):
        raise DataError(f'"{key}" is plain text, but --loss-scope all_assistant is only for conversations')
    if options.scope == "completion" and prompt is None:
        raise DataError(f'"{key}" has no prompt before it: --loss-scope completion needs a column "prompt" or a pair')
    if isinstance(completion, str):
        return _plain_text(str(prompt), completion, chat, options)
    chat.require_template()
    settings = template_settings(row)
    prompt_messages = prompt if isinstance(prompt, list) else []
    if options.scope == "all_assistant":
        prompt, prompt_messages, completion = None, [], [*prompt_messages, *completion]
    if prompt is None and options.mask and not options.for_rm:
        trained = trained_spans(
            chat, completion, role=options.role, only_last=options.scope == "last_turn", settings=settings,
            unanswered=options.untrained == "keep",
        )  # fmt: skip
        start = trained.spans[-1][0] if trained.spans else 0
        item = TextToEncode(trained.text, spans=trained.spans, eos=_eos(trained.text[start:], completion, chat))
        closed = item.eos is not None and trained_to_the_end(item)
        counts.update(trained.counts)
        counts[UNSTOPPED] -= closed
        return item
    if options.scope == "last_turn":
        prompt_messages, completion = prompt_messages + completion[:-1], completion[-1:]
    untrained = next((number for number, message in enumerate(completion) if not is_trained(message)), None)
    if untrained is not None and not options.for_rm:
        raise DataError(
            f'"{key}" message {untrained} has weight: 0, but all messages of "{key}" are trained; '
            "see --loss-scope all_assistant"
        )
    text = chat.render(prompt_messages + completion, settings)
    counts.update(chat.check_rendered(text, prompt_messages + completion, settings))
    if prompt is None or not options.mask or options.for_rm:
        return TextToEncode(text, eos=_eos(text, completion, chat))
    other_turns = sum(message["role"] != options.role for message in completion)
    if other_turns == len(completion):
        if options.untrained == "keep":
            return TextToEncode(text, spans=(), eos=_eos(text, completion, chat))
        raise DataError(f'no message of "{key}" has the role "{options.role}"; see --generation-role')
    counts["turns of others trained, as they follow the prompt (see --loss-scope)"] += other_turns
    rendered_prompt = chat.render(prompt_messages, settings, generation_prompt=True)
    start = len(os.path.commonprefix([rendered_prompt, text]))
    for number, message in enumerate(completion):
        for part in message_texts(message):
            if part.strip() not in text[start:]:
                raise DataError(
                    f'"{key}" message {number} cannot be verified: the rendered text after the prompt lacks its text'
                )
    return TextToEncode(text, prompt=rendered_prompt, eos=_eos(text[start:], completion, chat))


def _parts(
    row: Mapping[str, Any], key: str, options: ChatOptions, counts: Counter
) -> tuple[list[Message] | str | None, list[Message] | str]:
    """Return (prompt or None, completion) of one key of a row: both are texts, or both are messages."""
    if options.maps:
        return None, _with_system([_mapped(row, role, text) for role, text in options.maps], row, options, counts)
    if (value := row.get(key)) is None:
        present = ", ".join(map(str, row))
        raise DataError(f'no key "{key}" (found: {present}); name the right one with --jsonl-keys')
    prompt = row.get("prompt") if key in PROMPTED else None
    if isinstance(prompt, str) and not isinstance(value, str):
        prompt = prompt_message(prompt, conversation(value, key), key, options.role)
    implicit = key in PAIR and (prompt is None or isinstance(prompt, str) != isinstance(value, str))
    if implicit and all(side in row for side in PAIR):
        sides = [row[side] if isinstance(row[side], str) else conversation(row[side], side) for side in PAIR]
        if type(sides[0]) is not type(sides[1]):
            raise DataError('"chosen" and "rejected" must both be text, or both be conversations')
        if isinstance(value, str) or set(PAIR) <= set(options.keys):
            prompt, *answers = shared_prompt(*sides)
            value = answers[PAIR.index(key)]
        else:
            prompt = None
    if isinstance(value, str):
        if not isinstance(prompt, str):
            raise DataError(
                f'"{key}" is text, not a list of messages; plain text needs the column name completion, chosen or '
                'rejected, and a column "prompt"'
            )
        if options.system is not None:
            raise DataError(f'"{key}" is plain text, but --system-file is only for conversations')
        return prompt, value
    messages = conversation(value, key)
    if prompt is None:
        return None, _with_system(messages, row, options, counts)
    prompt_messages = conversation(prompt, "prompt")
    if messages[: len(prompt_messages)] == prompt_messages:
        raise DataError(
            f'"{key}" begins with the messages of "prompt", which would be written twice; remove the column "prompt"'
        )
    return _with_system(prompt_messages, row, options, counts), messages


def _plain_text(prompt: str, completion: str, chat: ChatTokenizer, options: ChatOptions) -> TextToEncode:
    """Return prompt and completion of plain text as one text to tokenise, with the eos_token at its end
    (as in TRL)."""
    chat.require_eos()
    end = "" if completion.endswith(chat.hf.eos_token) else chat.hf.eos_token
    masked = options.mask and not options.for_rm
    return TextToEncode(prompt + completion + end, prompt=prompt if masked else None, special=True)


def _mapped(row: Mapping[str, Any], role: str, text: str) -> Message:
    try:
        filled = text.format_map({key: value for key, value in row.items() if value is not None})
    except KeyError as missing:
        raise DataError(f"--map {role}: no column {missing} (found: {', '.join(map(str, row))})") from None
    except (ValueError, IndexError, AttributeError, TypeError) as problem:
        raise DataError(
            f"--map {role}={text}: {problem}; put column names in braces, and write a brace itself as {{{{ or }}}}"
        ) from None
    return {"role": role, "content": filled}


def _with_system(
    messages: list[Message], row: Mapping[str, Any], options: ChatOptions, counts: Counter
) -> list[Message]:
    """Return the messages with a system message put before them.

    It is the text in the row's column `system`, else the job's system message. Messages that already begin
    with a system message stay unchanged.
    """
    with_own = with_system(messages, None if options.maps else row_system(row))
    result = with_system(with_own, options.system)
    counts["conversations that keep a system message of their own"] += options.system is not None and result is with_own
    return result


def _eos(text: str, messages: Sequence[Message], chat: ChatTokenizer) -> int | None:
    """Return the id of the eos_token to add at the end (as in TRL); None if the text already ends with a
    stop token."""
    return None if chat.ends_with_stop_token(text, messages[-1]) else chat.require_eos()


def _reward(row: Mapping[str, Any], options: ChatOptions) -> float:
    key = str(options.reward_key)
    value = row.get(key)
    if options.binary_reward:
        if value not in (True, False, -1):
            raise DataError(f'"{key}" is {value!r}: with --binary-reward write true or false, 1 or 0, or 1 or -1')
        return 1.0 if value in (True,) else -1.0
    reward = finite_float(int(value) if isinstance(value, bool) else value)
    if reward is not None and abs(reward) <= float(np.finfo(np.float32).max):
        return reward
    raise DataError(f'"{key}" is {"missing" if key not in row else repr(value)}: a reward must be a finite number')


def _repaired(value: Any) -> Any:
    """Return a row's value with all its texts repaired by ftfy, however deeply nested."""
    if isinstance(value, str):
        return fix_text(value)
    if isinstance(value, dict):
        return {key: _repaired(item) for key, item in value.items()}
    return [_repaired(item) for item in value] if isinstance(value, list) else value


def trained_to_the_end(item: TextToEncode) -> bool:
    """Return whether the last non-blank character of the item's text is trained; the item has spans or a
    prompt."""
    return item.prompt is not None or bool(item.spans and not item.text[item.spans[-1][1] :].strip())
