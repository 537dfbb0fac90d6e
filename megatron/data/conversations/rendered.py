"""Whether a chat template wrote all that it was given.

A template is a program that nobody here wrote: it may leave out roles, calls or turns without a word, and a
model is then trained on, or asked, something else than the row says.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.data.conversations.messages import REASONING, Message
from megatron.data.errors import DataError

REASONING_LEFT_OUT = "messages whose reasoning the template leaves out"
_END_OF_REASONING = "</think>"
_SHOWN = 40

Render = Callable[[Sequence[Message]], str]


class RenderedCheck:
    """Compares messages with what one template made of them.

    Two ways, as each alone is blind: the texts must be found in what was rendered, in order; and where
    messages of the same roles and fields come for the first time, each with a mark of its own behind its
    text, all marks must be found. A short text may stand in the template itself, and a mark tells nothing of
    what a template does with certain texts.
    """

    def __init__(self) -> None:
        self._complete: set[tuple[Any, ...]] = set()  # roles and fields whose marks were all found

    def __call__(self, messages: Sequence[Message], text: str, render: Render, tools: list | None = None) -> Counter:
        """What the template leaves out by design, counted. Raises DataError, naming the message, for all else
        that it leaves out. render: of other messages the text, in the same way."""
        left_out: Counter = Counter()
        end = 0
        for number, message in enumerate(messages):
            anywhere = message["role"] in ("system", "developer")  # some templates write it before the last question
            begin = 0 if anywhere else end
            where = f"message {number} ({message['role']})"
            ends = [_end_of_content(message, text, begin, where, left_out)]
            ends += [_end_of_call(call, text, begin, where) for call in message.get("tool_calls", [])]
            end = end if anywhere else max(ends)
            reasonings = [message[name] for name in REASONING if isinstance(message.get(name), str)]
            left_out[REASONING_LEFT_OUT] += any(_find(one, text, begin) is None for one in reasonings)
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
        except ValueError:  # a template may refuse other texts: then these alone tell nothing
            return
        for number, mark in marks.items():
            if mark not in text:
                raise _left_out(f"message {number} ({messages[number]['role']})", messages[number]["content"])
        self._complete.add(shape)


def _end_of_content(message: Message, text: str, begin: int, where: str, left_out: Counter) -> int:
    """Where a message's content ends in the text. Reasoning before it may be left out, which is counted."""
    content = message.get("content", "")
    end = _find(content, text, begin)
    if end is None and _END_OF_REASONING in content:
        end = _find(content.rpartition(_END_OF_REASONING)[2], text, begin)
        left_out[REASONING_LEFT_OUT] += end is not None
    if end is None:
        raise _left_out(where, content)
    return end


def _end_of_call(call: Message, text: str, begin: int, where: str) -> int:
    """Where the name of a called tool ends in the text, behind which its arguments must be."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    end = _find(name, text, begin)
    if end is None:
        raise _left_out(where, f"the call of {name}")
    if not _has_arguments(arguments, text[begin:]):
        raise _left_out(where, f"arguments of {name}: {json.dumps(arguments, ensure_ascii=False)}")
    return end


def _has_arguments(arguments: dict[str, Any], text: str) -> bool:
    """As JSON in any spelling, or each value by itself, as templates that write XML have them."""
    if json.dumps(arguments, ensure_ascii=False) in text or any(
        arguments in (value, value.get("arguments"), value.get("parameters")) for value in _json_objects(text)
    ):
        return True
    if json.dumps(json.dumps(arguments, ensure_ascii=False), ensure_ascii=False) in text:
        return False  # JSON within the text of JSON
    return all(
        any(spelling in text for spelling in (str(leaf).strip(), json.dumps(leaf), _escaped(str(leaf).strip())))
        for leaf in _leaves(arguments)
    )


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    """All JSON objects that stand in a text, the inner ones too."""
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
    """Where a text ends that was written without blanks around it, as it stands or as in JSON."""
    for spelling in dict.fromkeys((part.strip(), _escaped(part.strip()))):
        place = text.find(spelling, begin)
        if place >= 0:
            return place + len(spelling)
    return None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _left_out(where: str, what: str) -> DataError:
    shown = repr(what if len(what) <= _SHOWN else what[:_SHOWN] + "...")
    return DataError(f"{where} is not in what the chat template writes, where it belongs: {shown}")
