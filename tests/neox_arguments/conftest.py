"""Fixtures of the configuration tests."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs

# What these tests depend on and no import names (tests/import_graph.py).
DEPENDS_ON = (
    "megatron.methods.language_modelling.declaration",
    "megatron.methods.preferences.declaration",
    "megatron.methods.preferences.checks",
    "megatron.methods.online_preferences.declaration",
    "megatron.methods.kto.declaration",
    "megatron.methods.kto.checks",
    "megatron.methods.reward.declaration",
    "megatron.methods.reward.checks",
    "megatron.methods.unlearning.declaration",
    "megatron.methods.unlearning.checks",
    "megatron.methods.distillation.declaration",
    "megatron.methods.distillation.checks",
    "megatron.methods.reinforcement.declaration",
    "megatron.methods.reinforcement.checks",
)

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
         "max_position_embeddings": 32}  # fmt: skip
TEXT = "".join(f"{key}: {value}\n" for key, value in MODEL.items())
ROOT = Path(__file__).parents[2]
ELEUTHER = json.loads((ROOT / "tests/data/golden/configs/configs_eleuther.json").read_text())
"""GPT-NeoX's results for its own files."""
TRAINABLE = {"train_iters": 1, "data_path": "d", "train_micro_batch_size_per_gpu": 1,
             "tokenizer_type": "CharLevelTokenizer"}  # fmt: skip


def message_states(problem: str, facts: str) -> bool:
    """Whether a message is of the place or key before the last ": " of `facts`, and has the words behind."""
    (place, _, words), text = facts.rpartition(": "), problem.removeprefix("program: ")
    matches = (re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", text[len(place) :]) for word in words.split())
    return text.startswith(place) and all(matches)


def all_say(problems: Sequence[str], facts: Sequence[str]) -> bool:
    """Whether there is a message of each of the facts, in their order, and no other."""
    return len(problems) == len(facts) and all(map(message_states, problems, facts))


def refused(facts: str, values: Mapping[str, Any]) -> bool:
    """Whether a configuration is refused with a message of these facts, perhaps among others."""
    return any(message_states(problem, facts) for problem in problems_of(values))


def problems_of(changes: Mapping[str, Any], check: Callable[[NeoXArgs], Any] = lambda args: args) -> tuple[str, ...]:
    """Problems of the small model with changes; () when it is accepted."""
    try:
        check(NeoXArgs.from_dict(MODEL | dict(changes)))
    except ConfigError as refused:
        return refused.problems
    return ()


@pytest.fixture
def model() -> dict[str, Any]:
    """The required keys of a small model."""
    return dict(MODEL)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Write files into an empty working directory: `write(a="...", b="...")` -> ["a.yml", "b.yml"]."""
    monkeypatch.chdir(tmp_path)

    def _write(**files: str) -> list[str]:
        names = [name.replace("__", ".") if "__" in name else name + ".yml" for name in files]
        for name, text in zip(names, files.values(), strict=True):
            (tmp_path / name).write_text(text)
        return names

    return _write
