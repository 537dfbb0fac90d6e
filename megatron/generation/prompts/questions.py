"""Reads questions to a model from a file: texts to continue, or conversations to answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.conversations import (
    CONVERSATION_COLUMNS,
    Message,
    TemplateSettings,
    check_characters,
    row_conversation,
    template_settings,
    with_system,
)
from megatron.generation.batching.requests import RequestError
from megatron.generation.prompts.chat import ChatTemplate
from megatron.neox_arguments.values.json_text import parse_json
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """A question to a model: a text to continue, or a conversation to answer.

    text: the text to show to people; for a conversation, its last message.
    messages: the messages of a conversation; if empty, the model continues `text`.
    settings: tools and variables for the chat template that renders the messages.
    """

    text: str
    messages: tuple[Message, ...] = ()
    settings: TemplateSettings = TemplateSettings()

    def tokens(self, tokenizer: Tokenizer, template: ChatTemplate | None, max_prompt_tokens: int) -> list[int]:
        """Returns the question as token ids. Raises RequestError if there are more than `max_prompt_tokens`
        of them, or if the chat template rejects the conversation."""
        if self.messages:
            assert template is not None
            tokens = template.tokens(self.messages, self.settings)
        else:
            tokens = tokenizer.tokenize(self.text)
        if len(tokens) > max_prompt_tokens:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; at most {max_prompt_tokens} fit beside the maximum_tokens of "
                "the answer"
            )
        return tokens


def ask(text: str, system: str | None = None) -> Question:
    """Returns a question that is a conversation: the system message `system` (None: none) and the user
    message `text`."""
    system_messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return Question(text, (*system_messages, {"role": "user", "content": text}))


def read_text(file: str | Path) -> str:
    """Returns the text of a UTF-8 file. Raises RequestError if the file cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise RequestError(f"{file}: cannot be read ({cause})") from cause


def read_questions(file: str | Path, chat: bool, system: str | None = None) -> list[Question]:
    """Reads a question from each line of a file. Raises RequestError, with file and line, for an invalid
    line.

    In a `.jsonl` file a line is `{"prompt": text}`, or `{"messages": [...]}` as in training data, of which an
    assistant's last message is left out. In any other file a line is a text.

    chat: True: a text or prompt is a user's message; False: the model continues it.
    system: the system message to add to conversations that have none; None: add none.
    """
    path, questions = Path(file), []
    for number, line in enumerate(read_text(path).split("\n"), 1):  # JSON may hold other separators of lines
        if not line.strip():
            continue
        try:
            entry: Any = parse_json(line) if path.suffix == ".jsonl" else {"prompt": line.strip()}
            questions.append(_question(entry, chat, system))
        except ValueError as problem:
            raise RequestError(f"{path}:{number}: {problem}") from problem
    if not questions:
        raise RequestError(f"{path}: holds no question; write one question per line")
    return questions


def _question(entry: Any, chat: bool, system: str | None) -> Question:
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if isinstance(prompt, str) and prompt:
        check_characters(prompt)
        return ask(prompt, system) if chat else Question(prompt)
    column = next((name for name in CONVERSATION_COLUMNS if isinstance(entry, dict) and name in entry), None)
    if column is None:
        raise ValueError('expected {"prompt": text} or {"messages": [{"role": ..., "content": text}, ...]}')
    messages = with_system(row_conversation(entry, column), system)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("the last message must be from user or tool, or an assistant's answer to such a message")
    return Question(messages[-1]["content"], tuple(messages), template_settings(entry))


def all_tokens(
    questions: Sequence[Question], tokenizer: Tokenizer, template: ChatTemplate | None, max_prompt_tokens: int
) -> list[list[int]]:
    """Returns each question as token ids. Raises RequestError, with the question's number, for a question
    that is too long or that the chat template rejects."""
    prompts = []
    for number, question in enumerate(questions, 1):
        try:
            prompts.append(question.tokens(tokenizer, template, max_prompt_tokens))
        except RequestError as problem:
            raise RequestError(f"question {number}: {problem}") from problem
    return prompts
