"""Checks that a chat template wrote all messages that it was given.

A template is a third-party program. It may silently leave out roles, tool calls or turns; the model would
then be trained on, or asked, something else than the row says.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.data.conversations.messages import REASONING, Message
from megatron.data.errors import DataError

REASONING_LEFT_OUT = "messages whose reasoning the template leaves out"
_END_OF_REASONING = "</think>"
_MAX_EXCERPT = 40

Render = Callable[[Sequence[Message]], str]


class RenderedCheck:
    """Checks that the text that a chat template rendered holds all messages.

    Two checks are made, because each alone misses cases. First, the messages' texts must occur in the
    rendered text, in order; but a short text may occur in the template itself. Second, for each new
    combination of roles and fields, a unique mark is appended to each message, the conversation is rendered
    again, and all marks must occur; but a mark does not show how the template treats particular texts.
    """

    def __init__(self) -> None:
        self._complete: set[tuple[Any, ...]] = set()  # roles and fields whose marks were all found

    def __call__(self, messages: Sequence[Message], text: str, render: Render, tools: list | None = None) -> Counter:
        """Check that `text`, rendered from `messages`, holds all of them; return counts of what the template
        omits by design.

        render: renders a list of messages by the same template. Raises DataError, naming the message, if
          anything else is missing.
        """
        left_out: Counter = Counter()
        end = 0
        for number, message in enumerate(messages):
            anywhere = message["role"] in (
                "system",
                "developer",
            )  # some templates write the system message before the last question
            begin = 0 if anywhere else end
            location = f"message {number} ({message['role']})"
            ends = [_end_of_content(message, text, begin, location, left_out)]
            ends += [_end_of_call(call, text, begin, location) for call in message.get("tool_calls", [])]
            end = end if anywhere else max(ends)
            reasonings = [message[name] for name in REASONING if isinstance(message.get(name), str)]
            left_out[REASONING_LEFT_OUT] += any(_find(reasoning, text, begin) is None for reasoning in reasonings)
        for tool in tools or []:
            name = tool.get("function", tool)["name"]
            if name not in text:
                raise _left_out("tools", name)
        self._check_marks(messages, render)
        return +left_out

    def _check_marks(self, messages: Sequence[Message], render: Render) -> None:
        shape = tuple((message["role"], *sorted(message), bool(message.get("content"))) for message in messages)
        if shape in self._complete:
            return
        marks = {i: f"mark{i}of{len(messages)}text" for i, message in enumerate(messages) if message.get("content")}
        marked = [
            {**message, "content": message["content"] + marks[i]} if i in marks else message
            for i, message in enumerate(messages)
        ]
        try:
            text = render(marked)
        except ValueError:  # the template refuses the marked texts, so they prove nothing
            return
        for number, mark in marks.items():
            if mark not in text:
                raise _left_out(f"message {number} ({messages[number]['role']})", messages[number]["content"])
        self._complete.add(shape)


def _end_of_content(message: Message, text: str, begin: int, location: str, left_out: Counter) -> int:
    """Return the position in `text` at which the message's content ends; it is searched from `begin` on.

    If the template omits reasoning before the content, this is counted in `left_out`. Raises DataError if the
    content is missing.
    """
    content = message.get("content", "")
    end = _find(content, text, begin)
    if end is None and _END_OF_REASONING in content:
        end = _find(content.rpartition(_END_OF_REASONING)[2], text, begin)
        left_out[REASONING_LEFT_OUT] += end is not None
    if end is None:
        raise _left_out(location, content)
    return end


def _end_of_call(call: Message, text: str, begin: int, location: str) -> int:
    """Return the position in `text` at which the name of a called tool ends; it is searched from `begin` on.

    Raises DataError if the name or the arguments of the call are missing.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    end = _find(name, text, begin)
    if end is None:
        raise _left_out(location, f"the call of {name}")
    if not _has_arguments(arguments, text[begin:]):
        raise _left_out(location, f"arguments of {name}: {json.dumps(arguments, ensure_ascii=False)}")
    return end


def _has_arguments(arguments: dict[str, Any], text: str) -> bool:
    """Return whether `text` contains a tool call's arguments: as JSON of any spelling, or each value
    alone, as XML templates write."""
    if json.dumps(arguments, ensure_ascii=False) in text or any(
        arguments in (value, value.get("arguments"), value.get("parameters")) for value in _json_objects(text)
    ):
        return True
    if json.dumps(json.dumps(arguments, ensure_ascii=False), ensure_ascii=False) in text:
        return False  # the arguments are in JSON as a text, in JSON
    return all(
        any(spelling in text for spelling in (str(leaf).strip(), json.dumps(leaf), _escaped(str(leaf).strip())))
        for leaf in _leaves(arguments)
    )


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield all JSON objects in a text, including nested objects."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            yield decoder.raw_decode(text, place)[0]
        except (ValueError, RecursionError):
            pass
        place = text.find("{", place + 1)


def _leaves(value: Any) -> Iterator[Any]:
    value = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _find(part: str, text: str, begin: int) -> int | None:
    """Return where `part` ends in `text`, searched from index `begin` on; None if it is not found.

    White space around `part` is ignored, and `part` may be JSON-escaped in `text`.
    """
    for spelling in dict.fromkeys((part.strip(), _escaped(part.strip()))):
        place = text.find(spelling, begin)
        if place >= 0:
            return place + len(spelling)
    return None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    """Return the beginning of a text in quotes, for error messages."""
    return repr(text if len(text) <= _MAX_EXCERPT else text[:_MAX_EXCERPT] + "...")


def _left_out(location: str, content: str) -> DataError:
    return DataError(
        f"{location} is not in what the chat template writes, or not in this order: {quoted(content)}; mend the "
        "template or the messages"
    )
