"""Fixtures of the configuration tests."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
}


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


@pytest.fixture
def problems_of() -> Callable[..., tuple[str, ...]]:
    """Problems of the small model with changes; () when it is accepted."""

    def _problems(changes: Mapping[str, Any], check: Callable[[NeoXArgs], Any] = lambda args: args) -> tuple[str, ...]:
        try:
            check(NeoXArgs.from_dict(MODEL | dict(changes)))
        except ConfigError as refused:
            return refused.problems
        return ()

    return _problems
