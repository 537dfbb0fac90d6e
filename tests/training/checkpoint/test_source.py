"""The checkpoint that a run starts from: an iteration without one is refused with its reason."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import CheckpointError
from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint.source import choose_source
from tests.training.runs import LLAMA, config


@pytest.mark.parametrize(("keys", "fact"), [
    ({}, "set load"),
    ({"load": "empty", "save": "empty"}, "empty holds no checkpoint"),
    ({"load": "saved", "save": "saved", "restart": True}, "restart: true ignores the checkpoints in"),
])  # fmt: skip
def test_an_iteration_without_a_checkpoint(tmp_path: Path, keys: dict[str, Any], fact: str) -> None:
    (tmp_path / "saved" / "global_step2").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    folders = {key: str(tmp_path / value) for key, value in keys.items() if isinstance(value, str)}
    args = NeoXArgs.from_dict(config(LLAMA, iteration=2, checkpoint_factor=1, **{**keys, **folders})).for_world(1)
    with pytest.raises(CheckpointError, match="^iteration: 2") as refused:
        choose_source(args)
    assert fact in str(refused.value)
