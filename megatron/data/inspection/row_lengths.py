"""Measures token lengths of raw rows before preprocessing: texts, conversations, prompts with answers, or
pairs."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from megatron.data.conversations.messages import (
    CONVERSATION_COLUMNS,
    PAIR,
    check_characters,
    conversation,
    prompt_message,
    row_conversation,
    row_system,
    shared_prompt,
    template_settings,
    with_system,
)
from megatron.data.errors import DataError
from megatron.data.inspection.statistics import CANDIDATE_LENGTHS, share
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer
from megatron.data.preprocessing.shards import InputRow

ROWS_AT_ONCE = 256
SUGGESTED = tuple(2**power for power in range(7, 21))
TARGET_SHARE = 0.95  # share of the rows that must fit into a suggested length
PARTS = {
    "pairs": ("prompt", *PAIR, "whole"),
    "prompts with completions": ("prompt", "completion", "whole"),
    "conversations": ("prompt", "completion", "whole"),
    "texts": ("whole",),
}


@dataclass(frozen=True)
class RowTexts:
    """The texts of a row whose tokens are counted.

    prompt: empty if there is none. full_texts: the prompt with each response.
    special: whether the tokenizer adds its own special tokens to the texts.
    """

    prompt: str
    full_texts: tuple[str, ...]
    special: bool


def kind_of_rows(row: Mapping[str, Any], text_column: str) -> str:
    """Return the kind of a file's rows (a key of PARTS), judged by the columns of its first row.

    Raises DataError if the row has none of the expected columns.
    """
    if all(side in row for side in PAIR):
        return "pairs"
    if "prompt" in row and "completion" in row:
        return "prompts with completions"
    if any(name in row for name in CONVERSATION_COLUMNS):
        return "conversations"
    if text_column in row:
        return "texts"
    raise DataError(
        f"no column to measure (found: {', '.join(map(str, row))}); expected {' and '.join(PAIR)}, prompt and "
        f"completion, {', '.join(CONVERSATION_COLUMNS)}, or {text_column} (--text-column)"
    )


def texts_to_measure(row: Mapping[str, Any], kind: str, text_column: str, chat: ChatTokenizer) -> RowTexts:
    """Return the texts of a row whose tokens are to be counted. Raises DataError if the row is not of
    `kind`."""
    if kind == "texts":
        return RowTexts("", (_text(row, text_column),), True)
    if kind == "conversations":
        name = next((name for name in CONVERSATION_COLUMNS if name in row), CONVERSATION_COLUMNS[0])
        messages = row_conversation(row, name)
        last = messages[-1:] if messages[-1]["role"] == "assistant" else []
        return _rendered(row, messages[: len(messages) - len(last)], [last], chat)
    names = PAIR if kind == "pairs" else ("completion",)
    answers: list[Any] = [
        row[name] if isinstance(row.get(name), str) else conversation(row.get(name), name) for name in names
    ]
    if len({type(answer) for answer in answers}) > 1:
        raise DataError(f"{' and '.join(names)} must both be text, or both be conversations")
    is_text, prompt = isinstance(answers[0], str), row.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        prompt = conversation(prompt, "prompt")
    elif prompt is not None and not is_text:
        prompt = prompt_message(prompt, answers[0], names[0], "assistant")
    if kind == "pairs" and (prompt is None or isinstance(prompt, str) != is_text):
        prompt, *answers = shared_prompt(*answers)
    if not is_text:
        system = row_system(row)
        if isinstance(prompt, list) and prompt:
            return _rendered(row, with_system(prompt, system), answers, chat)
        return _rendered(row, [], [with_system(answer, system) for answer in answers], chat)
    if not isinstance(prompt, str):
        raise DataError(f'"{names[0]}" is text, so it needs a column "prompt" that is text too')
    end = chat.hf.eos_token or ""
    return RowTexts(prompt, tuple(prompt + answer.removesuffix(end) + end for answer in answers), True)


def _rendered(row: Mapping[str, Any], prompt: Any, answers: Sequence[list], chat: ChatTokenizer) -> RowTexts:
    chat.require_template()
    settings, end = template_settings(row), chat.hf.eos_token or ""
    prompt_text = chat.render(prompt, settings, generation_prompt=True) if prompt and answers[0] else ""
    conversations = [[*prompt, *answer] for answer in answers]
    full_texts = [chat.render(messages, settings) for messages in conversations]
    for i, messages in enumerate(conversations):
        chat.check_rendered(full_texts[i], messages, settings)
        full_texts[i] += "" if chat.ends_with_stop_token(full_texts[i], messages[-1]) else end
    return RowTexts(prompt_text, tuple(full_texts), False)


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row.get(name), str):
        raise DataError(f'"{name}" is {type(row.get(name)).__name__}, not text')
    return row[name]


def measure_lengths(
    rows: Iterable[InputRow], chat: ChatTokenizer, text_column: str = "text"
) -> tuple[str, dict[str, np.ndarray]]:
    """Count the tokens of all rows; return (kind of the rows, {part: number of tokens in each row, [rows]
    int32}).

    PARTS lists the parts of each kind; "whole" is the prompt with the longer answer. Raises DataError, naming
    the row. Memory: 4 bytes per row and part.
    """
    kind = ""
    lengths: dict[str, array] = {}
    stream = iter(rows)
    while batch := list(islice(stream, ROWS_AT_ONCE)):
        texts = []
        for row in batch:
            value = row.value()
            value = {text_column: value} if isinstance(value, str) else value
            try:
                if not isinstance(value, dict):
                    raise DataError(f"is {type(value).__name__}, not an object with columns")
                if not kind:
                    kind = kind_of_rows(value, text_column)
                    lengths = {part: array("i") for part in PARTS[kind]}
                texts.append(texts_to_measure(value, kind, text_column, chat))
                for text in (texts[-1].prompt, *texts[-1].full_texts):
                    check_characters(text)
            except DataError as problem:
                raise DataError(f"{row.location()}: {problem}") from None
        for prompt, totals in _token_counts(texts, chat):
            numbers = [prompt, *(max(0, total - prompt) for total in totals), max(totals)]
            for part, number in zip(lengths, numbers if len(lengths) > 1 else totals, strict=True):
                lengths[part].append(number)
    return kind, {part: np.array(values, dtype=np.int32) for part, values in lengths.items()}


def _token_counts(texts: Sequence[RowTexts], chat: ChatTokenizer) -> Iterator[tuple[int, list[int]]]:
    backend = chat.hf.backend_tokenizer
    lengths: dict[tuple[str, bool], int] = {("", False): 0, ("", True): 0}
    for special in (False, True):
        distinct = {text for row in texts if row.special == special for text in (row.prompt, *row.full_texts) if text}
        encoded = backend.encode_batch_fast(list(distinct), add_special_tokens=special)
        lengths |= {(text, special): len(row.ids) for text, row in zip(distinct, encoded, strict=True)}
    for row in texts:
        yield lengths[row.prompt, row.special], [lengths[full_text, row.special] for full_text in row.full_texts]


def suggested_length(lengths: np.ndarray) -> int:
    """Return the smallest power of two that at least TARGET_SHARE (95 %) of the lengths do not exceed."""
    return next((length for length in SUGGESTED if (lengths <= length).mean() >= TARGET_SHARE), SUGGESTED[-1])


def summary(kind: str, lengths: Mapping[str, np.ndarray], max_length: int, max_prompt_length: int) -> list[str]:
    """Return a table of the lengths as lines for a terminal; the last line suggests values for the flags.

    max_length, max_prompt_length: limits in use; the table says how many rows exceed them.
    """
    full_lengths = lengths["whole"]
    note = " (prompt and longer answer)" if kind == "pairs" else ""
    lines = [f"{len(full_lengths)} {kind}, {full_lengths.sum(dtype=np.int64)} tokens{note}"]
    lines.append(
        f"{'tokens':<12}{'median':>8}{'p95':>8}{'max':>8}  share that fits"
        + "".join(f"{n:>8}" for n in CANDIDATE_LENGTHS)
    )
    for part, values in lengths.items():
        numbers = [int(np.percentile(values, p, method="higher")) for p in (50, 95, 100)]
        shares = "".join(f"{(values <= length).mean():>8.1%}" for length in CANDIDATE_LENGTHS)
        lines.append(f"{part:<12}" + "".join(f"{n:>8}" for n in numbers) + " " * 17 + shares)
    flags = []
    limits = (
        ("--max-length", max_length, "whole", "rows"),
        ("--max-prompt-length", max_prompt_length, "prompt", "prompts"),
    )
    for flag, limit, part, unit in limits:
        if part in lengths:
            count = int((lengths[part] > limit).sum())
            lines.append(
                f"{flag} {limit}: {count} {unit} ({share(count, len(full_lengths))}) are longer and would be cut"
            )
            flags.append(f"{flag} {suggested_length(lengths[part])}")
    lines.append(f"suggested: {' '.join(flags)} (powers of two that hold {TARGET_SHARE:.0%} of the rows)")
    return lines
