"""The shapes in which rows hold conversations, as messages with `role` and `content`: OpenAI's (with the
weights of fine-tuning files), ShareGPT's, LLaMA-Factory's and ms-swift's."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron.data.errors import DataError

Message = dict[str, Any]

PAIR = ("chosen", "rejected")
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
UNREAD_COLUMNS = ("weight", "train", "loss_weight", "loss_scale", "reasoning_content", "thinking")
"""Columns of a row that other programs read beside a conversation, and nothing here."""
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of messages that some templates write

_ROLES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "observation": "tool", "tool_response": "tool", "function": "tool",
}  # fmt: skip
_CALLING_ROLES = ("function_call", "tool_call", "tool_calls")  # the content is the JSON of calls
_TRAINED = ("weight", "train", "loss")  # of OpenAI, axolotl, ms-swift: whether a message is trained
_FRACTIONS = ("loss_weight", "loss_scale", "train_detail")


class TemplateSettings(NamedTuple):
    """What a row gives to its template beside messages: definitions of tools, and variables."""

    tools: list | None = None
    variables: Mapping[str, Any] | None = None


def conversation(value: object, name: str) -> list[Message]:
    """The messages of a column, as chat templates take them. name: of the column.

    Content is one text; tool calls are OpenAI's, their arguments objects; fields that are null are left out,
    at every depth. A message that is not to be trained has `weight: 0`. Raises DataError with its number.
    """
    value = _parsed(value, f'"{name}"') if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(value, list):
        raise DataError(f'"{name}" is {type(value).__name__}, not a list of messages')
    if not value:
        raise DataError(f'"{name}" is an empty conversation')
    return [_message(item, f'"{name}" message {number}') for number, item in enumerate(value)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{where} is {type(item).__name__}, not an object with role and content")
    message = _without_nulls(item)
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where} has no role (found: {', '.join(map(str, item)) or 'nothing'})")
    message["role"] = _ROLES.get(role, role)
    if role in _CALLING_ROLES:
        message |= {"role": "assistant", "tool_calls": message.pop("content", None)}
    calls = _calls(message, where)
    content = message.get("content")
    if content is None and not calls:
        raise DataError(f"{where} has no content (found: {', '.join(map(str, item))})")
    message["content"] = "" if content is None else _text(content, where)  # templates differ in what they make of none
    if calls:
        message["tool_calls"] = calls
    if not _weight(message, where):
        message["weight"] = 0
    return message


def _without_nulls(value: Any) -> Any:
    """Without the fields that a table filled with null, where other rows have them (as transformers, but at
    every depth)."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text(content: Any, where: str) -> str:
    """A message's content; parts of type text are joined (as OpenAI and vLLM)."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: content is {type(content).__name__}, not text")
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"{where}: part {number} of its content is of type {kind}; only parts of text are read")
        texts.append(text)
    return "".join(texts)


def _calls(message: Message, where: str) -> list[Message]:
    """The tool calls of a message, in OpenAI's form; taken out of it."""
    calls = message.pop("tool_calls", None)
    if calls is None:
        calls = message.pop("function_call", None)  # OpenAI's before there were several
    calls = _parsed(calls, f"{where}: tool_calls") if isinstance(calls, str) else calls
    calls = [calls] if isinstance(calls, dict) else calls or []
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls is {type(calls).__name__}, not a list")
    return [_call(call, f"{where}: tool_calls {number}") for number, call in enumerate(calls)]


def _call(call: object, where: str) -> Message:
    call = _parsed(call, where) if isinstance(call, str) else call
    if not isinstance(call, dict):
        raise DataError(f"{where} is {type(call).__name__}, not an object with a function")
    function: Any = call.get("function", {key: call[key] for key in call if key not in ("id", "type")})
    function = _parsed(function, where) if isinstance(function, str) and function.lstrip()[:1] == "{" else function
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has no function with a name (found: {', '.join(map(str, call))})")
    function = dict(function)
    arguments = function.pop("arguments", None)
    arguments = function.pop("parameters", {}) if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", f"{where}: the arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: the arguments of {function['name']} are {type(arguments).__name__}, not an object")
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {**function, "arguments": arguments}}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = f"{problem.msg} at column {problem.colno}" if isinstance(problem, json.JSONDecodeError) else problem
        raise DataError(f"{what} is no valid JSON ({reason})") from None


def _weight(message: Message, where: str) -> bool:
    """Whether a message is to be trained; its fields that say so are taken out of it."""
    trained = True
    for name in _FRACTIONS:
        if name in message:
            raise DataError(f"{where} has {name}, which is not supported; weight: 0 leaves a message untrained")
    for name in _TRAINED:
        value = message.pop(name, True)
        if value not in (0, 1):
            raise DataError(f"{where}: {name} is {value!r}; a message is trained (1, true) or not (0, false)")
        trained &= bool(value)
    return trained


def is_trained(message: Message) -> bool:
    """Whether a message may be trained, which `weight: 0` or `train: false` rule out."""
    return message.get("weight") != 0


def message_texts(message: Message) -> list[str]:
    """The texts of a message: its content, and the names of the tools that it calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    return [message["content"], *names]


def template_settings(row: Mapping[str, Any]) -> TemplateSettings:
    """Of a row, from its columns `tools` (a list, or JSON of one) and `chat_template_kwargs`. Raises
    DataError for columns that hold something else."""
    tools, variables = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        tools = _parsed(tools, '"tools"') if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f'"tools" is {type(tools).__name__}, not a list')
    if variables is not None and not isinstance(variables, dict):
        raise DataError(f'"chat_template_kwargs" is {type(variables).__name__}, not an object')
    tools = [_tool(tool, f'"tools" {number}') for number, tool in enumerate(tools or [])]
    return TemplateSettings(tools or None, _without_nulls(variables))


def _tool(tool: Any, where: str) -> Message:
    """The definition of a tool, its parameters an object."""
    tool = _without_nulls(_parsed(tool, where) if isinstance(tool, str) else tool)
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    function = _parsed(function, where) if isinstance(function, str) else function
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} is no definition of a tool with a name")
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": _parsed(function["parameters"] or "{}", f"{where}: its parameters")}
    return {**tool, "function": function} if "function" in tool else function


def row_system(row: Mapping[str, Any]) -> str | None:
    """The system message that a row has in a column of its own, as LLaMA-Factory's."""
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise DataError(f'"system" is {type(system).__name__}, not the text of a system message')
    return system or None


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """The messages behind a system message, unless they have one of their own."""
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def row_conversation(row: Mapping[str, Any], name: str) -> list[Message]:
    """The messages of a row's column, behind its column `system`."""
    return with_system(conversation(row.get(name), name), row_system(row))


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
