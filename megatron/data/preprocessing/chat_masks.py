"""Finds and checks the trained parts of a conversation, as spans of characters and as labels of tokens.

A template with `{% generation %}` marks what the model writes. For other templates, an answer is the text
that the render up to and including it adds to the prompt (the render before it, with the generation prompt).
Either way every trained answer is checked, and a failure is an error:
1. the trained text is the answer, with what the template puts around every answer;
2. the stop token, where the template has one, is trained;
3. the text before the answer begins with the exact prompt that the model sees in generation (prefix-stable).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.conversations.messages import Message, TemplateSettings, is_trained, message_texts, roles_of
from megatron.data.conversations.rendered import quoted
from megatron.data.errors import DataError
from megatron.data.labels import MASKED
from megatron.data.preferences.pairwise import common_prefix
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, Span

UNSTOPPED = "answers without a stop token"  # its name among the counts of a job

_WORD = re.compile(r"\S")


@dataclass(frozen=True)
class TrainedText:
    """A rendered conversation with the character ranges (spans) that are trained.

    counts: answers without a stop token, and what the template omits by design.
    """

    text: str
    spans: tuple[Span, ...]
    counts: Counter


def trained_spans(
    chat: ChatTokenizer,
    messages: Sequence[Message],
    *,
    role: str = "assistant",
    only_last: bool = False,
    settings: TemplateSettings = TemplateSettings(),  # noqa: B008 - frozen
    unanswered: bool = False,
) -> TrainedText:
    """Render a conversation, and return its text with the spans of the answers, the messages of `role`.

    With only_last, only the last message has a span, if it is an answer. An answer with `weight: 0` has no
    span. An answer that opens the conversation, without a prompt, has a span only if the template marks it.
    unanswered: allow a conversation without a message of `role`; otherwise it raises DataError.
    Raises DataError for a failed check.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == role]
    if not answers and unanswered:
        text = chat.render(messages, settings)
        return TrainedText(text, (), chat.check_rendered(text, messages, settings))
    if not answers:
        raise DataError(f'no message has the role "{role}" (found: {roles_of(messages)}); see --generation-role')
    selected = [i for i in answers if is_trained(messages[i]) and (i == len(messages) - 1 or not only_last)]
    render = _TemplateRenderer(chat, settings)
    prompts = {index: render.prompt(messages, index) for index in selected}
    text, spans = render.marked(messages, answers, selected) if render.is_marked else render.compared(messages, prompts)
    counts = chat.check_rendered(text, messages, settings)
    for index, span in spans.items():
        prompt = prompts[index]
        if not text.startswith(prompt):
            raise DataError(_unstable(index, prompt, text))
        render.check_answer(messages, index, text, span, prompt)
        counts[UNSTOPPED] += check_stop(chat, text, span, messages[index], index)
    return TrainedText(text, tuple(spans.values()), counts)


class _TemplateRenderer:
    """Renders the conversations of one row, which share tools and template variables.

    is_marked: whether the template marks answers with `{% generation %}`.
    """

    def __init__(self, chat: ChatTokenizer, settings: TemplateSettings):
        self.chat, self.settings, self.is_marked = chat, settings, chat.marks_generation(settings.tools)

    def prompt(self, messages: Sequence[Message], index: int) -> str:
        """Return the prompt that the model gets before it writes message `index`."""
        return self.chat.render(messages[:index], self.settings, generation_prompt=True) if index else ""

    def marked(
        self, messages: Sequence[Message], answers: list[int], selected: list[int]
    ) -> tuple[str, dict[int, Span]]:
        """Return (text, {index: span} of the selected answers), with the spans that the template marks by
        `{% generation %}`."""
        text, spans = self.chat.render_generations(messages, self.settings)
        if len(spans) != len(answers):
            raise DataError(
                f"the template marks {len(spans)} texts with {{% generation %}}, but the conversation has "
                f"{len(answers)} answers, so the marks cannot be matched to them; correct the template"
            )
        return text, {index: span for index, span in zip(answers, spans, strict=True) if index in selected}

    def compared(self, messages: Sequence[Message], prompts: Mapping[int, str]) -> tuple[str, dict[int, Span]]:
        """Return (text, {index: span} of each answer after message 0), with spans found by comparing renders.

        The span is what the render up to and including the answer adds to the answer's prompt. prompts:
        {index: rendered prompt} of the answers. Raises DataError if a later message changes what precedes it.
        """
        text = self.chat.render(messages, self.settings)
        spans = {}
        for index, prompt in prompts.items():
            if index:
                rendered = self.chat.render(messages[: index + 1], self.settings)
                if not text.startswith(rendered):  # a template may end every conversation in the eos_token
                    rendered = rendered.rstrip().removesuffix(self.chat.hf.eos_token or "")
                if not text.startswith(rendered):
                    raise DataError(_unstable(index, rendered, text))
                spans[index] = (len(prompt), len(rendered))
        return text, spans

    def check_answer(self, messages: Sequence[Message], index: int, text: str, span: Span, prompt: str) -> None:
        """Raise DataError unless the span of message `index` holds its answer, and nothing of other
        messages."""
        body = text[slice(*span)]
        for part in message_texts(messages[index]):
            if part.strip() not in body:
                raise DataError(
                    f"message {index} cannot be verified: its trained text {quoted(body)} does not hold the message's "
                    f"text {quoted(part.strip())}; use a template that writes it unchanged"
                )
        content = messages[index].get("content")
        affixes = None
        if isinstance(content, str) and set(messages[index]) <= {"role", "content"}:
            lead, suffix = self._affixes(messages, index, body, prompt)
            if content.strip():
                affixes = (lead, suffix)
            if not self.is_marked and lead.strip():
                self._check_lead(lead, messages, index, prompt)
        if affixes is not None and affixes in self.chat.verified:
            return
        # Changing the words of all other messages must not change the trained text
        altered = [
            message if i == index or message["role"] in ("system", "developer", "tool") else _other_words(message, i)
            for i, message in enumerate(messages)
        ]
        if self.is_marked:
            answers = [i for i, message in enumerate(messages) if message["role"] == messages[index]["role"]]
            probe, spans = self.marked(altered, answers, [index])
        else:
            probe, spans = self.compared(altered, {index: self.prompt(altered, index)})
        if probe[slice(*spans[index])] != body:
            raise DataError(
                f"message {index} cannot be verified: its trained text contains words of other messages: "
                f"{quoted(body)}; use a template that writes each message by itself"
            )
        if affixes is not None:
            self.chat.verified.add(affixes)

    def _affixes(self, messages: Sequence[Message], index: int, body: str, prompt: str) -> tuple[str, str]:
        """Return what the template writes before and after the answer within its span `body`.

        An empty answer is replaced by placeholder words to find this out.
        """
        answer = messages[index]["content"].strip()
        if not answer and not self.is_marked:
            altered = _other_words(messages[index], index)
            text, spans = self.compared([*messages[:index], altered], {index: prompt})
            answer, body = altered["content"], text[slice(*spans[index])]
        lead, _, suffix = body.partition(answer) if answer else ("", "", body)
        return lead, suffix

    def _check_lead(self, lead: str, messages: Sequence[Message], index: int, prompt: str) -> None:
        """Raise DataError if the template writes words before the answer that its generation prompt does not
        have.

        lead: what the template writes between its generation prompt and the answer.
        """
        silent = prompt == self.chat.render(messages[:index], self.settings)
        bare = lead.strip()
        for token in () if silent else self.chat.added:
            bare = bare.replace(token, "")
        if bare.strip():
            raise DataError(
                f"message {index} cannot be verified: the template writes {quoted(lead)} before the answer, but not in "
                "its generation prompt; mark the answers in the template with {% generation %}"
            )


def check_stop(chat: ChatTokenizer, text: str, span: Span, message: Message, index: int) -> bool:
    """Return whether an answer lacks a stop token: False if its trained text ends with one, else True.

    Raises DataError if a stop token follows that is not trained, because the model would never learn to stop.
    """
    if chat.ends_with_stop_token(text[slice(*span)], message):
        return False
    following = text[span[1] :].lstrip()
    for token in chat.added:
        if following.startswith(token):
            raise DataError(
                f"message {index} cannot be verified: {token} after the answer is not trained, so the model "
                "would never stop; move it inside {% generation %} in the template"
            )
    return True


def span_labels(ids: np.ndarray, ranges: np.ndarray, text: str, spans: Sequence[Span]) -> np.ndarray:
    """Return labels [n] int32, not shifted: the id of each token with a character in a span, MASKED
    elsewhere.

    ranges [n, 2]: the characters of each token. A token that begins in the prompt and ends in the answer is
      trained. A token that begins the text after the answer, and holds only trailing white space of the
      answer, is not.
    """
    trained = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        last = start + len(text[start:end].rstrip())
        next_word = _WORD.search(text, end)
        overlaps = (ranges[:, 1] > start) & (ranges[:, 0] < end)
        if next_word:
            overlaps &= (ranges[:, 0] < last) | (ranges[:, 1] <= next_word.start())
        trained |= overlaps
    return np.where(trained, ids, MASKED).astype(np.int32)


def completion_labels(prompts: Sequence[np.ndarray], full_rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the labels of each full row (prompt and completion), with the prompt masked as in TRL 1.16.

    The completion begins where the tokens of the prompt and of the full row first differ, which may be inside
    the prompt. If there are several rows (chosen, rejected), all begin at the earliest of these positions.
    """
    length = min(common_prefix(prompt, full_ids) for prompt, full_ids in zip(prompts, full_rows, strict=True))
    return [np.where(np.arange(len(full_ids)) < length, MASKED, full_ids).astype(np.int32) for full_ids in full_rows]


def delimiter_labels(ids: np.ndarray, delimiter: Sequence[int]) -> tuple[np.ndarray, bool]:
    """Return (labels, whether `delimiter` occurs in `ids`).

    Tokens up to the end of the first delimiter are masked; without a delimiter, no token is masked.
    """
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
    num_equal = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
    return (
        f"message {index} cannot be verified: the conversation up to this message renders as "
        f"{quoted(part[num_equal:])} where the full conversation renders as {quoted(text[num_equal:])}: the template "
        "changes earlier text (try --only-last, or a template for training)"
    )
