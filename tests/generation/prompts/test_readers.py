"""Shapes of conversations times all that reads them: the same prompt, or the same refusal.

Templates are those that TRL ships; the prompt is transformers' own of the messages in one plain shape.
"""

import json
import shutil
from collections.abc import Callable
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron.data.inspection.row_lengths import texts_to_measure
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_rows import prepare
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from megatron.data.preprocessing.inputs import resolve
from megatron.generation.prompts.chat import ChatTemplate
from megatron.generation.prompts.questions import read_questions
from megatron.generation.serving.errors import APIError
from megatron.generation.serving.request_parsing import RequestParser
from megatron.methods.reinforcement.prompts import read_rows
from megatron.neox_arguments.errors import UserError
from megatron.tokenizer import HFTokenizer
from prepare_hf_dataset import Texts
from tests.generation.serving.server import FOLDER

Row = dict[str, Any]

TOOL = {"name": "tide", "description": "Tide height", "parameters": {"type": "object", "properties": {"port": {"type": "string"}}}}  # fmt: skip # noqa: E501
TOOLS = [{"type": "function", "function": TOOL}]
QUESTION, ANSWER = {"role": "user", "content": "Tide at Brest?"}, {"role": "assistant", "content": "It is 3.2 m."}
FUNCTION = {"name": "tide", "arguments": {"port": "Brest"}}
AS_TEXT = {**FUNCTION, "arguments": '{"port": "Brest"}'}
RESULT = {"role": "tool", "content": "3.2 m"}
NULLS = {"content": None, "tool_calls": None, "name": None}


def call_row(**fields: Any) -> Row:
    """Question, call, result and answer; fields: of the message that calls."""
    return {"messages": [QUESTION, {"role": "assistant", "content": "", **fields}, RESULT, ANSWER], "tools": TOOLS}


CALL = call_row(tool_calls=[{"type": "function", "function": FUNCTION}])
SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]}
QUESTION_AND_ANSWER = {"messages": [QUESTION, ANSWER]}
SHAPES: dict[str, tuple[str, Row, Row]] = {
    "calls": ("qwen2_5", CALL, CALL),
    "arguments as text": ("qwen2_5", call_row(tool_calls=[{"id": "c1", "type": "function", "function": AS_TEXT}]), CALL),  # noqa: E501
    "calls without a function": ("qwen2_5", call_row(tool_calls=[FUNCTION], content=None), CALL),
    "calls as text": ("qwen2_5", call_row(tool_calls=json.dumps([FUNCTION])), CALL),
    "one call, as it was once": ("qwen2_5", call_row(function_call=AS_TEXT), CALL),
    "tools as text": ("qwen2_5", {**CALL, "tools": json.dumps(TOOLS)}, CALL),
    "parameters as text": (
        "qwen2_5", {**CALL, "tools": [{"type": "function", "function": {**TOOL, "parameters": json.dumps(TOOL["parameters"])}}]}, CALL,  # noqa: E501
    ),
    "nulls of a table": (
        "qwen2_5",
        {
            **call_row(tool_calls=[{"id": None, "type": "function", "function": {**FUNCTION, "arguments": {"port": "Brest", "day": None}}}]),  # noqa: E501
            "tools": [{"type": "function", "function": {**TOOL, "strict": None}}], "system": None,
        },
        CALL,
    ),
    "LLaMA-Factory": (
        "qwen2_5",
        {
            "conversations": [
                {"from": "human", "value": "Tide at Brest?"}, {"from": "function_call", "value": json.dumps(FUNCTION)},
                {"from": "observation", "value": "3.2 m"}, {"from": "gpt", "value": "It is 3.2 m."},
            ],
            "tools": json.dumps(TOOLS),
        },
        CALL,
    ),
    "ShareGPT in a table": (
        "qwen3_training",
        {"conversations": [{"from": "human", "value": QUESTION["content"], **NULLS}, {"from": "gpt", "value": ANSWER["content"], **NULLS}]},  # noqa: E501
        QUESTION_AND_ANSWER,
    ),
    "parts of text": ("qwen3_training", {"messages": [{**QUESTION, "content": [{"type": "text", "text": "Tide "}, {"type": "text", "text": "at Brest?"}]}, ANSWER]}, QUESTION_AND_ANSWER),  # noqa: E501
    "column system": ("qwen3_training", {**QUESTION_AND_ANSWER, "system": "Be brief."}, SYSTEM),
    "weights": ("qwen3_training", {"messages": [QUESTION, {**ANSWER, "weight": 1, "name": None}]}, QUESTION_AND_ANSWER),
    "template variables": ("qwen3_training", {**QUESTION_AND_ANSWER, "chat_template_kwargs": {"enable_thinking": False}}, {**QUESTION_AND_ANSWER, "enable_thinking": False}),  # noqa: E501
}  # fmt: skip
REFUSED: dict[str, tuple[str, Row, str]] = {
    "a role that the template knows not": ("qwen3", {"messages": [{"role": "developer", "content": "In French."}, QUESTION, ANSWER]}, "message 0 (developer)"),  # noqa: E501
    "calls that the template knows not": ("phi3", CALL, "message 1 (assistant)"),
    "tools that the template knows not": ("phi3", {**QUESTION_AND_ANSWER, "tools": TOOLS}, "tide"),
    "an empty part": ("qwen3_training", {"messages": [{**QUESTION, "content": [{"type": "text"}]}, ANSWER]}, "message 0: part 0 of its content has no text"),  # noqa: E501
    "a picture": ("qwen3_training", {"messages": [{**QUESTION, "content": [{"type": "image_url"}]}, ANSWER]}, "message 0: part 0 of its content is of type image_url"),  # noqa: E501
    "arguments that are no JSON": ("qwen2_5", call_row(tool_calls=[{**FUNCTION, "arguments": "{port"}]), "message 1: tool_calls 0: the arguments of tide"),  # noqa: E501
    "a weight between": ("qwen3_training", {"messages": [{**QUESTION, "weight": 0.5}, ANSWER]}, "message 0: weight is 0.5"),  # noqa: E501
    "a turn that a short text hides": ("gemma", {"messages": [QUESTION, ANSWER, {"role": "tool", "content": "o"}, ANSWER]}, "roles"),  # noqa: E501
}  # fmt: skip


class Readers:
    """Each method reads a row its own way: the prompt of the last answer, or a text that begins with it."""

    def __init__(self, template: str, folder: Path) -> None:
        path = str(files("trl").joinpath("chat_templates", f"{template}.jinja"))
        self.folder, self.file = folder / "tokenizer", folder / "rows.jsonl"
        shutil.copytree(FOLDER, self.folder)
        shutil.copy(path, self.folder / "chat_template.jinja")
        self.chat: ChatTokenizer = load_chat_tokenizer(str(self.folder), None, date(2026, 1, 1))
        self.template = ChatTemplate(Path(path).read_text(), HFTokenizer(FOLDER), path)
        names = ("preprocess", "score", "analyse", "prepare", "roll_out", "serve", "ask")
        self.all: dict[str, Callable[[Row, str], str]] = {name: getattr(self, f"_{name}") for name in names}

    def _preprocess(self, row: Row, key: str) -> str:
        return prepare(row, self.chat, ChatOptions((key,))).items[0].text

    def _score(self, row: Row, key: str) -> str:
        return prepare(row, self.chat, ChatOptions((key,), for_rm=True, untrained="keep")).items[0].text

    def _analyse(self, row: Row, key: str) -> str:
        return texts_to_measure(row, "conversations", "text", self.chat).prompt

    def _prepare(self, row: Row, key: str) -> str:
        self.file.write_text(json.dumps(row) + "\n")
        [shard] = resolve([self.file])[0].shards(None)
        texts = Texts((key,), False, True, False, False, str(self.folder), False, 1)
        return "".join(map(texts.text, shard.rows()))

    def _roll_out(self, row: Row, key: str) -> str:
        self.file.write_text(json.dumps({**row, "prompt": row[key][:-1]}) + "\n")
        [read] = read_rows([str(self.file)])
        assert not isinstance(read.prompt, str)
        return self._decoded(self.template.tokens(read.prompt, read.settings))

    def _serve(self, row: Row, key: str) -> str:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        body = {"model": "m", "messages": system + row[key][:-1], "tools": tools, "tool_choice": "none"}
        body["chat_template_kwargs"] = row.get("chat_template_kwargs")
        parser = RequestParser(("m",), self.template.tokenizer, 4096, (0,), self.template)
        return self._decoded(parser.chat_completion(json.dumps(body).encode()).requests[0].tokens)

    def _ask(self, row: Row, key: str) -> str:
        """tools/ask.py and demo_prompts."""
        self.file.write_text(json.dumps(row) + "\n")
        [question] = read_questions(self.file, True)
        return self._decoded(question.tokens(self.template.tokenizer, self.template, 4096))

    def _decoded(self, tokens: Any) -> str:
        return self.template.tokenizer.detokenize(list(tokens))


def key_of(row: Row) -> str:
    return "conversations" if "conversations" in row else "messages"


@pytest.mark.parametrize("shape", SHAPES)
def test_all_read_the_same_prompt(shape: str, tmp_path: Path) -> None:
    template, row, normalised = SHAPES[shape]
    readers = Readers(template, tmp_path)
    hf = transformers.AutoTokenizer.from_pretrained(FOLDER)
    hf.chat_template = readers.template.text
    settings = {name: value for name, value in normalised.items() if name != "messages"}
    expected = hf.apply_chat_template(
        normalised["messages"][:-1], tokenize=False, add_generation_prompt=True, **settings
    )
    for name, read in readers.all.items():
        text = read(row, key_of(row))
        assert text == expected if name in ("analyse", "roll_out", "serve", "ask") else text.startswith(expected), name


@pytest.mark.parametrize("shape", REFUSED)
def test_all_refuse_the_same(shape: str, tmp_path: Path) -> None:
    template, row, facts = REFUSED[shape]
    for name, read in Readers(template, tmp_path).all.items():
        with pytest.raises((UserError, APIError)) as refusal:
            read(row, key_of(row))
        assert facts in str(refusal.value), name
