"""Reads conversations from rows, and returns them as messages with `role` and `content`.

Formats: OpenAI's (including the `weight` of messages in fine-tuning files), ShareGPT's, LLaMA-Factory's and
  ms-swift's.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron.data.errors import DataError

Message = dict[str, Any]

PAIR = ("chosen", "rejected")
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
UNREAD_COLUMNS = ("weight", "train", "loss_weight", "loss_scale", "reasoning_content", "thinking")
"""Columns of conversation rows that other training programs read, but this program ignores."""
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # fields of messages with reasoning, which some templates render

_ROLES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "observation": "tool", "tool_response": "tool", "function": "tool",
}  # fmt: skip
_CALLING_ROLES = ("function_call", "tool_call", "tool_calls")  # the content is the JSON of calls
_TRAINED = ("weight", "train", "loss")  # of OpenAI, axolotl, ms-swift: whether a message is trained
_FRACTIONS = ("loss_weight", "loss_scale", "train_detail")


class TemplateSettings(NamedTuple):
    """The inputs of a chat template other than the messages: tool definitions and template variables."""

    tools: list | None = None
    variables: Mapping[str, Any] | None = None


def conversation(value: object, name: str) -> list[Message]:
    """Return the messages in a column of a row, in the form that chat templates take.

    value: the content of the column, a list of messages or its JSON. name: the column's name, for errors.
    Content becomes one text, tool calls take OpenAI's form with objects as arguments, and null fields are
    removed at every depth. A message that must not be trained gets `weight: 0`. Raises DataError, naming the
    message, if it cannot be read.
    """
    value = _parsed(value, f'"{name}"') if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(value, list):
        raise DataError(f'"{name}" is {type(value).__name__}, not a list of messages with role and content')
    if not value:
        raise DataError(f'"{name}" is an empty conversation; it needs at least one message')
    return [_message(item, f'"{name}" message {number}') for number, item in enumerate(value)]


def _message(item: object, location: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{location} is {type(item).__name__}, not an object with role and content")
    message = _without_nulls(item)
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{location} has no role (found: {', '.join(map(str, item)) or 'nothing'})")
    message["role"] = _ROLES.get(role, role)
    if role in _CALLING_ROLES:
        message |= {"role": "assistant", "tool_calls": message.pop("content", None)}
    calls = _calls(message, location)
    content = message.get("content")
    if content is None and not calls:
        raise DataError(f"{location} has no content (found: {', '.join(map(str, item))})")
    # Templates treat a missing content differently
    message["content"] = "" if content is None else _text(content, location)
    if calls:
        message["tool_calls"] = calls
    if not _weight(message, location):
        message["weight"] = 0
    return message


def _without_nulls(value: Any) -> Any:
    """Return the value without null fields, at every depth.

    A table adds null fields to a row because other rows have these fields. (transformers removes them at the
    top level only.)
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text(content: Any, location: str) -> str:
    """Return a message's content as one text; a list of parts of type text is joined, as in OpenAI's API
    and vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{location}: content is {type(content).__name__}, not text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) and kind == "text" else part
        if not isinstance(text, str):
            if kind == "text":
                raise DataError(f"{location}: part {number} of its content has no text; write it under the key text")
            raise DataError(f"{location}: part {number} of its content is of type {kind}; only type text can be read")
        texts.append(text)
    return "".join(texts)


def _calls(message: Message, location: str) -> list[Message]:
    """Remove the tool calls from a message and return them in OpenAI's form."""
    calls = message.pop("tool_calls", None)
    if calls is None:
        calls = message.pop("function_call", None)  # OpenAI's older field, with a single call
    calls = _parsed(calls, f"{location}: tool_calls") if isinstance(calls, str) else calls
    calls = [calls] if isinstance(calls, dict) else calls or []
    if not isinstance(calls, list):
        raise DataError(f"{location}: tool_calls is {type(calls).__name__}, not a list")
    return [_call(call, f"{location}: tool_calls {number}") for number, call in enumerate(calls)]


def _call(call: object, location: str) -> Message:
    call = _parsed(call, location) if isinstance(call, str) else call
    if not isinstance(call, dict):
        raise DataError(f"{location} is {type(call).__name__}, not an object with a function")
    function: Any = call.get("function", {key: call[key] for key in call if key not in ("id", "type")})
    function = _parsed(function, location) if isinstance(function, str) and function.lstrip()[:1] == "{" else function
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{location} has no function with a name (found: {', '.join(map(str, call))})")
    function = dict(function)
    arguments = function.pop("arguments", None)
    arguments = function.pop("parameters", {}) if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", f"{location}: the arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise DataError(
            f"{location}: the arguments of {function['name']} are {type(arguments).__name__}, not an object"
        )
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {**function, "arguments": arguments}}


def _parsed(text: str, label: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = f"{problem.msg} at column {problem.colno}" if isinstance(problem, json.JSONDecodeError) else problem
        raise DataError(f"{label} is not valid JSON ({reason})") from None


def _weight(message: Message, location: str) -> bool:
    """Return whether a message is trained, and remove the fields that say so (weight, train, loss) from
    the message."""
    trained = True
    for name in _FRACTIONS:
        if name in message:
            raise DataError(
                f"{location}: {name} is not supported; remove it, or write weight: 0 if the message must not be trained"
            )
    for name in _TRAINED:
        value = message.pop(name, True)
        if value not in (0, 1):
            raise DataError(
                f"{location}: {name} is {value!r}; write 1 or true if the message is trained, 0 or false if not"
            )
        trained &= bool(value)
    return trained


def is_trained(message: Message) -> bool:
    """Return whether a message from `conversation` may be trained: False if it has `weight: 0`."""
    return message.get("weight") != 0


def message_texts(message: Message) -> list[str]:
    """Return the texts of a message: its content, then the names of the tools that it calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    return [message["content"], *names]


def template_settings(row: Mapping[str, Any]) -> TemplateSettings:
    """Return the `TemplateSettings` of a row, from its columns `tools` and `chat_template_kwargs`.

    `tools` is a list or its JSON, `chat_template_kwargs` an object. Raises DataError for other types.
    """
    tools, variables = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        tools = _parsed(tools, '"tools"') if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f'"tools" is {type(tools).__name__}, not a list of tool definitions')
    if variables is not None and not isinstance(variables, dict):
        raise DataError(f'"chat_template_kwargs" is {type(variables).__name__}, not an object of template variables')
    tools = [_tool(tool, f'"tools" {number}') for number, tool in enumerate(tools or [])]
    return TemplateSettings(tools or None, _without_nulls(variables))


def _tool(tool: Any, location: str) -> Message:
    """Return the definition of a tool, with its parameters as an object instead of JSON text."""
    tool = _without_nulls(_parsed(tool, location) if isinstance(tool, str) else tool)
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    function = _parsed(function, location) if isinstance(function, str) else function
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{location} is not a tool definition: it needs a function with a name")
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": _parsed(function["parameters"] or "{}", f"{location}: its parameters")}
    return {**tool, "function": function} if "function" in tool else function


def row_system(row: Mapping[str, Any]) -> str | None:
    """Return the system message in the column `system` of a row (as in LLaMA-Factory); None if there is
    none."""
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise DataError(f'"system" is {type(system).__name__}; write the text of a system message, or remove it')
    return system or None


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Return the messages, with `system` put before them as a system message.

    They stay unchanged if `system` is None, or if they already begin with a system message.
    """
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def row_conversation(row: Mapping[str, Any], name: str) -> list[Message]:
    """Return the messages in column `name` of a row, after the system message in its column `system` (see
    `with_system`)."""
    return with_system(conversation(row.get(name), name), row_system(row))


def shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Split two conversations, or two texts, into (shared prompt, rest of chosen, rest of rejected).

    The shared prompt is the common beginning of both, as in TRL 1.16. Raises DataError if they begin
    differently.
    """
    length = min(len(chosen), len(rejected))
    end = next((i for i in range(length) if chosen[i] != rejected[i]), length - 1)
    if 0 < end < length and chosen[end] != rejected[end] and chosen[end - 1] == " ":
        end -= 1  # the space before a word belongs to the word
    if end < 1:
        raise DataError('"chosen" and "rejected" begin differently; put their prompt into a column "prompt"')
    return chosen[:end], chosen[end:], rejected[end:]


def prompt_message(prompt: str, messages: list[Message], key: str, role: str) -> list[Message] | None:
    """Return the text column `prompt` as a list of one user message, to go before `messages`.

    Returns None if the messages already begin with the prompt: their first message that is not a system
      message has another role than `role` and contains the prompt's text. For the columns chosen and rejected
      (`key`) another role is enough.
    """
    first_message = next((message for message in messages if message["role"] != "system"), messages[0])
    is_held = first_message["role"] != role and (
        key in PAIR or prompt.strip() in map(str.strip, message_texts(first_message))
    )
    return None if is_held else [{"role": "user", "content": prompt}]


def check_characters(text: str) -> None:
    """Raise DataError if a text contains half of a surrogate pair, which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            "the text holds half of a surrogate pair, which is not a character; remove it from the data"
        ) from None


def roles_of(messages: Iterable[Message]) -> str:
    """Return the distinct roles of the messages, joined by commas, for error messages."""
    return ", ".join(dict.fromkeys(message["role"] for message in messages))
