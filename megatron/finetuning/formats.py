"""Recognises what the rows of a data file hold: chats, pairs of answers, judged answers or texts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.data import DataError
from megatron.data.conversations import CONVERSATION_COLUMNS, Message, conversation
from megatron.neox_arguments.values.json_text import parse_json

Row = Mapping[str, Any]
CHATS, PAIRS, JUDGED, TEXTS = "chats", "pairs", "judged", "texts"
_QUESTIONS = (
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"), ("query", "response"),
    ("prompt", "completion"), ("prompt", "response"), ("input", "output"), ("question", "response"),
)  # fmt: skip
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_TEXTS = ("text", "content")
_DETAILS = ("input", "context")  # of an instruction: Alpaca's and Dolly's columns
_ANSWERS = ("completion", "response", "answer")
EXPECTED = (
    "chats (a column messages, or question and answer, instruction and output, prompt and completion), pairs (prompt, "
    "chosen, rejected), judged answers (prompt, completion, label) or texts (text)"
)


class DataFormat(NamedTuple):
    """A format of rows.

    kind: CHATS, PAIRS, JUDGED or TEXTS. description: what was recognised, for people. convert: returns the
        row as preprocessing reads it; raises DataError for a row of another format.
    """

    kind: str
    description: str
    convert: Callable[[Row], dict[str, Any]]


def recognise(row: object, name: str) -> DataFormat:
    """Returns the format of a file by its row `row`. Raises DataError if it is none.

    name: of the file, for the message.
    """
    if isinstance(row, str):  # a text file
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise DataError(f"{name}: a row is {type(row).__name__}, not an object with columns; expected are {EXPECTED}")
    row_format = _format_of(_in_lower_case(row))
    if row_format is None:
        raise DataError(f"{name}: the columns {', '.join(row)} are of no known format; expected are {EXPECTED}")
    convert = row_format.convert
    return row_format._replace(convert=lambda row: convert(_in_lower_case(row)))


def _in_lower_case(row: Row) -> Row:
    """Returns a row whose columns have names in lower case; of two equal names, the written one counts."""
    return {**{str(name).lower(): value for name, value in row.items()}, **row}


def _format_of(row: Row) -> DataFormat | None:
    if {"chosen", "rejected"} <= row.keys():
        return DataFormat(PAIRS, "pairs of answers (chosen, rejected)", _pair)
    answer = _present(row, _ANSWERS)
    if "label" in row and answer is not None and "prompt" in row:
        return DataFormat(JUDGED, f"judged answers (prompt, {answer}, label)", _answer_reader(answer))
    column = _present(row, CONVERSATION_COLUMNS)
    if column is not None:
        return DataFormat(CHATS, f"chats ({column})", lambda row: _chat(row, column))
    for question, answer in _QUESTIONS:
        if question in row and answer in row:
            columns = f"{question}, {answer}"
            return DataFormat(CHATS, f"questions and answers ({columns})", _question_reader(question, answer))
    text = _present(row, _TEXTS)
    if text is not None:
        return DataFormat(TEXTS, f"texts ({text})", lambda row: {"text": _text(row, text)})
    return None


def prompt_of(row: Row, kind: str) -> dict[str, Any] | None:
    """Returns the question of a converted row as a line of `demo_prompts`; None if it has none."""
    if kind == TEXTS:
        words = str(row["text"]).split()
        return {"prompt": " ".join(words[:12])} if len(words) > 12 else None
    messages = row["messages"] if kind == CHATS else row["prompt"]
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=None)
    return None if last is None else {"messages": messages[: last + 1]}


def _present(row: Row, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f'"{column}" is not a text')
    return value


def _messages(value: object, role: str, name: str) -> list[Message]:
    """Returns a text as one message of `role`, or messages, also as JSON, as they are."""
    if not isinstance(value, str) or _is_json_of_messages(value):
        return conversation(value, name)
    if not value.strip():
        raise DataError(f'"{name}" is empty')
    return [{"role": role, "content": value}]


def _is_json_of_messages(text: str) -> bool:
    """Returns whether a text is not an answer such as "[1, 2]", but a column of messages in a CSV file."""
    if not text.lstrip().startswith("["):
        return False
    try:
        items = parse_json(text)
    except ValueError:
        return False
    return bool(items) and all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in items)


def _chat(row: Row, column: str) -> dict[str, Any]:
    messages = conversation(row.get(column), column)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(f'"{column}" has no message of the assistant (roles: {roles})')
    return {**{name: value for name, value in row.items() if name != column}, "messages": messages}


def _question_reader(question: str, answer: str) -> Callable[[Row], dict[str, Any]]:
    def read(row: Row) -> dict[str, Any]:
        user_text = row.get(question)
        details = next((row[name] for name in _DETAILS if row.get(name)), None) if question == "instruction" else None
        if isinstance(user_text, str) and isinstance(details, str) and details.strip():
            user_text = f"{user_text}\n\n{details}"
        messages = _messages(user_text, "user", question) + _messages(row.get(answer), "assistant", answer)
        if row.get("system"):
            messages = [*_messages(row["system"], "system", "system"), *messages]
        return {"messages": messages}

    return read


def _pair(row: Row) -> dict[str, Any]:
    sides = [_messages(row.get(side), "assistant", side) for side in ("chosen", "rejected")]
    if row.get("prompt") is not None:
        prompt = _messages(row["prompt"], "user", "prompt")
    else:  # both sides are whole conversations
        shared = 0
        while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
            shared += 1
        prompt, sides = sides[0][:shared], [side[shared:] for side in sides]
    sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    if not prompt or not all(sides):
        raise DataError('"chosen" and "rejected" have no common question; add a column prompt')
    return {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}


def _answer_reader(answer: str) -> Callable[[Row], dict[str, Any]]:
    def read(row: Row) -> dict[str, Any]:
        label = _LABELS.get(str(row.get("label")).lower())
        if label is None:
            raise DataError(f'"label" is {row.get("label")!r}; expected is true or false')
        prompt = _messages(row.get("prompt"), "user", "prompt")
        return {"prompt": prompt, "completion": _messages(row.get(answer), "assistant", answer), "label": label}

    return read
