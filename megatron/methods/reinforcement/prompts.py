"""Prompts of reinforcement learning: reads them from JSONL files, orders them, and tokenises them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import DataError
from megatron.data.conversations import TemplateSettings, conversation, row_system, template_settings, with_system
from megatron.methods.reinforcement.keys import rollout_keys
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.values.json_text import parse_json
from megatron.process import look_for_stop

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """A line of a prompt file.

    prompt: a text, or messages for the chat template.
    columns: the other fields of the line.
    place: FILE:LINE, for messages.
    settings: settings of the chat template in this line.
    """

    prompt: str | Messages
    columns: Mapping[str, Any]
    place: str
    settings: TemplateSettings = TemplateSettings()


@dataclass(frozen=True)
class Prompt:
    """A prompt for the model to answer.

    number: index in the run's order of prompts. tokens: the prompt as token ids.
    """

    number: int
    row: PromptRow
    tokens: list[int]


def read_rows(files: Sequence[str], key: str = "prompt", chat: bool = False) -> list[PromptRow]:
    """Reads the rows of all prompt files.

    key: name of the field that holds the prompt. chat: turn a text into a user message.
    Raises DataError, with file and line, for a row that is no prompt, and for files without any.
    """
    rows = []
    for name in files:
        try:
            lines = Path(name).read_text(encoding="utf-8").split("\n")  # JSON may hold other separators of lines
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"rollout.prompts: the file {name} cannot be read: {problem}") from problem
        rows += [_row(line, f"{name}:{number}", key, chat) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"rollout.prompts: no prompt found in {', '.join(files)}; the files have only empty lines")
    return rows


def _row(line: str, place: str, key: str, chat: bool) -> PromptRow:
    try:
        entry = parse_json(line)
    except ValueError as problem:
        raise DataError(f"{place}: the line is not valid JSON ({problem}); write one JSON object per line") from problem
    prompt: Any = entry.get(key) if isinstance(entry, dict) else None
    if not prompt or not isinstance(prompt, str | list):
        expected_form = f'{{"{key}": text or [{{"role": ..., "content": ...}}, ...], ...}}'
        raise DataError(f"{place}: expected a line {expected_form} (rollout.prompt_key: {key})")
    columns = {name: value for name, value in entry.items() if name != key}
    if isinstance(prompt, str) and not chat:
        return PromptRow(prompt, columns, place)
    try:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else conversation(prompt, key)
        return PromptRow(with_system(messages, row_system(entry)), columns, place, template_settings(entry))
    except DataError as problem:
        raise DataError(f"{place}: {problem} (rollout.prompt_key: {key})") from None


@dataclass(frozen=True)
class Prompts:
    """Holds the prompts of a run. Each epoch goes through all rows, with `shuffle` in a new random order.

    tokens: the tokens of each row's prompt, from `tokens_of`.
    """

    rows: Sequence[PromptRow]
    tokens: Sequence[list[int]]
    seed: int
    shuffle: bool

    def __getitem__(self, number: int) -> Prompt:
        """Returns the run's prompt number `number`; numbers continue over epochs."""
        epoch, row = divmod(number, len(self.rows))
        if self.shuffle:
            row = int(_permutation(len(self.rows), self.seed, epoch)[row])
        return Prompt(number, self.rows[row], self.tokens[row])


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def tokens_of(
    args: ModelArgs, rows: Sequence[PromptRow], tokenize: Callable[[str | Messages, TemplateSettings], list[int]]
) -> list[list[int]]:
    """Returns the tokens of each row's prompt. `rollout.max_prompt_length` truncates long prompts on the
    left.

    Raises DataError for a prompt that is empty, refused by the chat template, or too long without that key.
    """
    tokens = []
    for row in rows:
        look_for_stop()
        try:
            tokens.append(fitted(args, tokenize(row.prompt, row.settings)))
        except ValueError as problem:
            raise DataError(f"{row.place}: {problem}") from problem
    return tokens


def fitted(args: ModelArgs, tokens: list[int]) -> list[int]:
    """Truncates a prompt on the left to `rollout.max_prompt_length` tokens.

    Raises ValueError for an empty prompt, and for one that is too long if that key is unset.
    """
    maximum = rollout_keys(args)["max_prompt_length"]
    longest = args.seq_length - 1 if maximum is None else maximum
    if len(tokens) > longest and maximum is None:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, but seq_length leaves only {longest} beside an answer; raise "
            "seq_length, or set rollout.max_prompt_length to truncate prompts at their beginning"
        )
    if not tokens:
        raise ValueError("the prompt is empty: it has no token")
    return tokens[-longest:]
