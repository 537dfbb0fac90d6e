"""Prompts of reinforcement learning: the rows of JSON files, the order in which they are taken, and their
tokens."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import DataError
from megatron.data.conversations import TemplateSettings, conversation, row_system, template_settings, with_system
from megatron.data.sampler import data_seed
from megatron.neox_arguments import NeoXArgs
from megatron.process import look_for_stop

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """A line of a file of prompts. prompt: a text, or messages for the chat template, which gets `settings`
    too; columns: the other fields; place: FILE:LINE."""

    prompt: str | Messages
    columns: Mapping[str, Any]
    place: str
    settings: TemplateSettings = TemplateSettings()


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered. number: in the order of the run; tokens: what the model reads."""

    number: int
    row: PromptRow
    tokens: list[int]


def read_rows(files: Sequence[str], key: str = "prompt", chat: bool = False) -> list[PromptRow]:
    """The rows of all files. key: the field that holds the prompt; chat: texts are a user's words. Raises
    DataError with file and line."""
    rows = []
    for name in files:
        try:
            lines = Path(name).read_text(encoding="utf-8").split("\n")  # JSON may hold other separators of lines
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"rollout.prompts: {name}: cannot be read ({problem})") from problem
        rows += [_row(line, f"{name}:{number}", key, chat) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"rollout.prompts: {', '.join(files)}: holds no prompt")
    return rows


def _row(line: str, place: str, key: str, chat: bool) -> PromptRow:
    try:
        entry = json.loads(line)
    except ValueError as problem:
        raise DataError(f"{place}: is no JSON ({problem}); a line is one prompt") from problem
    prompt: Any = entry.get(key) if isinstance(entry, dict) else None
    if not prompt or not isinstance(prompt, str | list):
        what = f'{{"{key}": text or [{{"role": ..., "content": ...}}, ...], ...}}'
        raise DataError(f"{place}: expected {what} (rollout.prompt_key: {key})")
    columns = {name: value for name, value in entry.items() if name != key}
    if isinstance(prompt, str) and not chat:
        return PromptRow(prompt, columns, place)
    try:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else conversation(prompt, key)
        return PromptRow(with_system(messages, row_system(entry)), columns, place, template_settings(entry))
    except DataError as problem:
        raise DataError(f"{place}: {problem} (rollout.prompt_key: {key})") from None


@dataclass(frozen=True)
class PromptOrder:
    """Which row each prompt of a run is: all rows, in another random order in each pass."""

    rows: int
    seed: int
    shuffle: bool

    def row(self, number: int) -> int:
        """The row of prompt `number`."""
        epoch, place = divmod(number, self.rows)
        if not self.shuffle:
            return place
        return int(_permutation(self.rows, self.seed, epoch)[place])


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run in order. tokens: of each row."""

    rows: Sequence[PromptRow]
    tokens: Sequence[list[int]]
    order: PromptOrder

    @classmethod
    def of(cls, args: NeoXArgs, rows: Sequence[PromptRow], tokens: Sequence[list[int]]) -> "Prompts":
        """The prompts that `rollout` asks for. tokens: as of `tokens_of`."""
        assert args.rollout is not None
        return cls(rows, tokens, PromptOrder(len(rows), data_seed(args), args.rollout["shuffle"]))

    def __getitem__(self, number: int) -> Prompt:
        """The prompt `number` of the run."""
        index = self.order.row(number)
        return Prompt(number, self.rows[index], self.tokens[index])


def tokens_of(
    args: NeoXArgs, rows: Sequence[PromptRow], tokenize: Callable[[str | Messages, TemplateSettings], list[int]]
) -> list[list[int]]:
    """The tokens of each row's prompt, without the beginning of one that `rollout.max_prompt_length` cuts.
    Raises DataError for one that has no token, is too long, or that the chat template refuses."""
    found = []
    for row in rows:
        look_for_stop()
        try:
            found.append(fitted(args, tokenize(row.prompt, row.settings)))
        except ValueError as problem:
            raise DataError(f"{row.place}: {problem}") from problem
    return found


def fitted(args: NeoXArgs, tokens: list[int]) -> list[int]:
    """A prompt's tokens, without the beginning of one that `rollout.max_prompt_length` cuts. Raises
    ValueError for one that has no token or is too long."""
    assert args.rollout is not None
    most = args.rollout["max_prompt_length"]
    longest = args.seq_length - 1 if most is None else most
    if len(tokens) > longest and most is None:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, and a row of seq_length holds {longest} beside an answer; set "
            "rollout.max_prompt_length, with which prompts lose their beginning, or a longer seq_length"
        )
    if not tokens:
        raise ValueError("the prompt has no token")
    return tokens[-longest:]
