"""Which characters and tokens of a conversation are trained: spans, their verification, and labels.

A template with `{% generation %}` says what the model writes. Of another one, an answer is what the render of
the conversation up to and with it has more than the prompt (the render before it, with the generation
prompt). Either way three things are checked of every trained answer, and what fails is an error:
1. the trained text is the answer, between what the template puts around every answer;
2. the stop token, where the template has one, is trained;
3. the text before it begins with the very prompt that the model sees when it is asked (prefix-stable).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.conversations import Message, is_trained, message_texts
from megatron.data.conversations.messages import roles_of
from megatron.data.errors import DataError
from megatron.data.labels import MASKED
from megatron.data.preferences.pairwise import common_prefix
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, Span

UNSTOPPED = "answers without a stop token"  # how this is called among the counts of a job

_WORD = re.compile(r"\S")


@dataclass(frozen=True)
class TrainedText:
    """A rendered conversation and its character ranges that are trained. counts: answers without a stop
    token, and what the template leaves out by design."""

    text: str
    spans: tuple[Span, ...]
    counts: Counter


def trained_spans(
    chat: ChatTokenizer,
    messages: Sequence[Message],
    *,
    role: str = "assistant",
    only_last: bool = False,
    tools: list | None = None,
    variables: Mapping[str, Any] | None = None,
    unanswered: bool = False,
) -> TrainedText:
    """Every answer of `role`; with only_last, the last message, if it is one. Raises DataError for what fails
    a check, and for a conversation without a message of `role`, unless `unanswered`.

    An answer with `weight: 0` is not trained; one that opens the conversation, without a prompt, is only
    where the template marks it.
    """
    render = _TemplateRenderer(chat, tools, variables)
    answers = [i for i, message in enumerate(messages) if message["role"] == role]
    if not answers and unanswered:
        text = chat.render(messages, tools, variables)
        return TrainedText(text, (), chat.check_rendered(text, messages, tools, variables))
    if not answers:
        raise DataError(f'no message has the role "{role}" (found: {roles_of(messages)}); see --generation-role')
    wanted = [i for i in answers if is_trained(messages[i]) and (i == len(messages) - 1 or not only_last)]
    marked = chat.marks_generation(tools)
    prompts = {index: render.prompt(messages, index) for index in wanted}
    text, spans = render.marked(messages, answers, wanted) if marked else render.compared(messages, prompts)
    counts = chat.check_rendered(text, messages, tools, variables)
    for index, span in spans.items():
        prompt = prompts[index]
        if not text.startswith(prompt):
            raise DataError(_unstable(index, prompt, text))
        render.check_answer(messages, index, text, span, marked, prompt)
        counts[UNSTOPPED] += check_stop(chat, text, span, messages[index], index)
    return TrainedText(text, tuple(spans.values()), counts)


class _TemplateRenderer:
    """Renders of the conversations of one row, which share tools and template variables."""

    def __init__(self, chat: ChatTokenizer, tools: list | None, variables: Mapping[str, Any] | None):
        self.chat, self.settings = chat, (tools, variables)

    def prompt(self, messages: Sequence[Message], index: int) -> str:
        """What the model is given before it writes message `index`."""
        return self.chat.render(messages[:index], *self.settings, generation_prompt=True) if index else ""

    def marked(self, messages: Sequence[Message], answers: list[int], wanted: list[int]) -> tuple[str, dict[int, Span]]:
        """The text, and the span of each wanted answer that the template marks with `{% generation %}`."""
        text, spans = self.chat.render_generations(messages, *self.settings)
        if len(spans) != len(answers):
            raise DataError(
                f"the template marks {len(spans)} texts with {{% generation %}}, but {len(answers)} messages are to be "
                "trained: it cannot be told which is which"
            )
        return text, {index: span for index, span in zip(answers, spans, strict=True) if index in wanted}

    def compared(self, messages: Sequence[Message], prompts: Mapping[int, str]) -> tuple[str, dict[int, Span]]:
        """The text, and the span by which each answer lengthens its prompt."""
        text = self.chat.render(messages, *self.settings)
        spans = {}
        for index, prompt in prompts.items():
            if index:
                until = self.chat.render(messages[: index + 1], *self.settings)
                if not text.startswith(until):  # a template may end every conversation in the eos_token
                    until = until.rstrip().removesuffix(self.chat.hf.eos_token or "")
                if not text.startswith(until):
                    raise DataError(_unstable(index, until, text))
                spans[index] = (len(prompt), len(until))
        return text, spans

    def check_answer(
        self, messages: Sequence[Message], index: int, text: str, span: Span, marked: bool, prompt: str
    ) -> None:
        """Raise DataError unless the span of message `index` holds its answer, and nothing of other
        messages."""
        body = text[slice(*span)]
        for part in message_texts(messages[index]):
            if part.strip() not in body:
                raise DataError(
                    f"message {index} cannot be verified: what is trained, {_short(body)}, does not hold its text "
                    f"{_short(part.strip())}"
                )
        content = messages[index].get("content")
        around = None
        if isinstance(content, str) and set(messages[index]) <= {"role", "content"}:
            lead, rest = self._around(messages, index, body, marked, prompt)
            if content.strip():
                around = (lead, rest)
            if not marked and lead.strip():
                self._check_lead(lead, messages, index, prompt)
        if around is not None and around in self.chat.verified:
            return
        # With other words from the others nothing that is trained may change
        others = [
            message if i == index or message["role"] in ("system", "developer", "tool") else _other_words(message, i)
            for i, message in enumerate(messages)
        ]
        if marked:
            answers = [i for i, message in enumerate(messages) if message["role"] == messages[index]["role"]]
            probe, spans = self.marked(others, answers, [index])
        else:
            probe, spans = self.compared(others, {index: self.prompt(others, index)})
        if probe[slice(*spans[index])] != body:
            raise DataError(
                f"message {index} cannot be verified: what is trained holds the words of other messages: {_short(body)}"
            )
        if around is not None:
            self.chat.verified.add(around)

    def _around(self, messages: Sequence[Message], index: int, body: str, marked: bool, prompt: str) -> tuple[str, str]:
        """(what the template puts before an answer, what behind it); around other words where the answer is
        empty."""
        answer = messages[index]["content"].strip()
        if not answer and not marked:
            other = _other_words(messages[index], index)
            text, spans = self.compared([*messages[:index], other], {index: prompt})
            answer, body = other["content"], text[slice(*spans[index])]
        lead, _, rest = body.partition(answer) if answer else ("", "", body)
        return lead, rest

    def _check_lead(self, lead: str, messages: Sequence[Message], index: int, prompt: str) -> None:
        """Raise DataError where the template writes words before an answer that its generation prompt
        lacks."""
        silent = prompt == self.chat.render(messages[:index], *self.settings)
        bare = lead.strip()
        for token in () if silent else self.chat.added:
            bare = bare.replace(token, "")
        if bare.strip():
            raise DataError(
                f"message {index} cannot be verified: the template writes {_short(lead)} before the answer, which its "
                "generation prompt lacks; mark the answers in it with {% generation %}"
            )


def check_stop(chat: ChatTokenizer, text: str, span: Span, message: Message, index: int) -> bool:
    """False when the trained text of a message ends in a stop token, True when the template has none there.

    Raises DataError when one stands right behind what is trained: the model would never learn to stop.
    """
    if chat.ends_with_stop_token(text[slice(*span)], message):
        return False
    behind = text[span[1] :].lstrip()
    for token in chat.added:
        if behind.startswith(token):
            raise DataError(
                f"message {index} cannot be verified: {token} behind the answer is not trained, so that the model "
                "would never stop; move it inside {% generation %}"
            )
    return True


def span_labels(ids: np.ndarray, ranges: np.ndarray, text: str, spans: Sequence[Span]) -> np.ndarray:
    """Labels [n] int32, not shifted: the id of each token with a character in a span, MASKED elsewhere.

    ranges [n, 2]: the characters of each token. A token that begins in the prompt and ends in the answer is
    trained. One that begins what follows the answer, and has of it only blanks that the tokenizer gives to
    it, is not.
    """
    trained = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        last = start + len(text[start:end].rstrip())
        behind = _WORD.search(text, end)
        inside = (ranges[:, 1] > start) & (ranges[:, 0] < end)
        if behind:
            inside &= (ranges[:, 0] < last) | (ranges[:, 1] <= behind.start())
        trained |= inside
    return np.where(trained, ids, MASKED).astype(np.int32)


def completion_labels(prompts: Sequence[np.ndarray], wholes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Labels of each prompt+completion: what follows the prompt, as TRL 1.16.

    The completion begins where prompt and whole part, which may be inside the prompt's tokens. Completions of
    one prompt (chosen, rejected) begin at the same place, the first of theirs.
    """
    length = min(common_prefix(prompt, whole) for prompt, whole in zip(prompts, wholes, strict=True))
    return [np.where(np.arange(len(whole)) < length, MASKED, whole).astype(np.int32) for whole in wholes]


def delimiter_labels(ids: np.ndarray, delimiter: Sequence[int]) -> tuple[np.ndarray, bool]:
    """(labels, found): all up to and with the first occurrence of `delimiter` is masked; without one nothing
    is."""
    size = len(delimiter)
    labels = np.asarray(ids, dtype=np.int32).copy()
    if size and len(ids) >= size:
        windows = np.lib.stride_tricks.sliding_window_view(labels, size)
        starts = np.flatnonzero((windows == np.asarray(delimiter)).all(axis=1))
        if len(starts):
            labels[: starts[0] + size] = MASKED
            return labels, True
    return labels, False


def _other_words(message: Message, number: int) -> Message:
    only_calls = not message["content"] and "tool_calls" in message
    return message if only_calls else {**message, "content": f"Other{number}words"}


def _unstable(index: int, part: str, text: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
    return (
        f"message {index} cannot be verified: rendered alone, the conversation reads {_short(part[same:])} where the "
        f"whole reads {_short(text[same:])}: the template rewrites what came before (try --only-last, or a template "
        "for training)"
    )


def _short(text: str, length: int = 40) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")
