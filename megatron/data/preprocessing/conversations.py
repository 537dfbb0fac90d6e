"""Conversations: the shapes in which rows hold them, as messages with `role` and `content`."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.data.errors import DataError

Message = dict[str, Any]

PAIR = ("chosen", "rejected")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # how `from` names the two speakers


def conversation(value: object, name: str) -> list[Message]:
    """Messages with `role` and `content` from a column of these, or of ShareGPT's `from` and `value`.

    name: of the column. Raises DataError, naming the message, for one that is none.
    """
    if not isinstance(value, list):
        raise DataError(f'"{name}" is {type(value).__name__}, not a list of messages')
    if not value:
        raise DataError(f'"{name}" is an empty conversation')
    return [_message(item, f'"{name}" message {number}') for number, item in enumerate(value)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{where} is {type(item).__name__}, not an object with role and content")
    message = {key: value for key, value in item.items() if value is not None}  # as transformers; tables fill with None
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        message["role"] = SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{where} has no role (found: {', '.join(map(str, item)) or 'nothing'})")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise DataError(f"{where} has no content (found: {', '.join(map(str, item))})")
    if not isinstance(content, str | list | None):
        raise DataError(f"{where}: content is {type(content).__name__}, not text")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function") or {}, dict) for call in calls
    ):
        raise DataError(f"{where}: tool_calls is no list of objects with a function, an object too")
    return message


def message_texts(message: Message) -> list[str]:
    """The texts of a message: its content, or the text parts of it, and the names of the tools that it
    calls."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content or []
    texts = [part.get("text", "") if isinstance(part, dict) else part for part in parts]
    calls = message.get("tool_calls") or []
    names = [(call.get("function") or call).get("name") for call in calls]
    return [text for text in [*texts, *names] if isinstance(text, str)]


def template_settings(row: Mapping[str, Any]) -> tuple[list | None, dict[str, Any]]:
    """(tools, template variables) of a row, from its columns `tools` (a list, or JSON of one) and
    `chat_template_kwargs`. Raises DataError for columns that hold something else."""
    tools, variables = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as problem:
            raise DataError(f'"tools" is not valid JSON ({problem.msg} at column {problem.colno})') from None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f'"tools" is {type(tools).__name__}, not a list')
    if variables is not None and not isinstance(variables, dict):
        raise DataError(f'"chat_template_kwargs" is {type(variables).__name__}, not an object')
    return tools or None, variables or {}


def shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) without the beginning that two conversations, or two texts, share (as TRL
    1.16)."""
    length = min(len(chosen), len(rejected))
    end = next((i for i in range(length) if chosen[i] != rejected[i]), length - 1)
    if 0 < end < length and chosen[end] != rejected[end] and chosen[end - 1] == " ":
        end -= 1  # the blank before a word belongs to the word
    if end < 1:
        raise DataError('"chosen" and "rejected" share no beginning to be their prompt; give a column "prompt"')
    return chosen[:end], chosen[end:], rejected[end:]


def prompt_message(prompt: str, messages: list[Message], key: str, role: str) -> list[Message] | None:
    """The column `prompt`, a text beside messages, as the message of a user.

    None where the messages begin with that text already; in pairs, where they begin with any message of a
    user.
    """
    first = next((message for message in messages if message["role"] != "system"), messages[0])
    is_held = first["role"] != role and (key in PAIR or prompt.strip() in map(str.strip, message_texts(first)))
    return None if is_held else [{"role": "user", "content": prompt}]


def check_characters(text: str) -> None:
    """Raise DataError for text that no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError("the text holds half of a surrogate pair, which is no character") from None


def roles_of(messages: Iterable[Message]) -> str:
    """The roles that occur, for messages to people."""
    return ", ".join(dict.fromkeys(message["role"] for message in messages))
