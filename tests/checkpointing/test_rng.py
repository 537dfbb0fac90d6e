"""Random states under NeoX's keys, through a file."""

import random
from pathlib import Path

import numpy as np
import torch

from megatron.checkpointing import load_tensors, restore_rng, rng_state, save_tensors
from tests.checkpointing.golden import checkpoint, fails

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_draws_repeat_after_a_file(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.randn()  # leaves half a pair behind, which is part of the state
    save_tensors(rng_state(CPU), tmp_path / "rng.pt")
    expected = draw()
    assert draw() != expected
    restore_rng(load_tensors(tmp_path / "rng.pt"), CPU, "f")
    assert draw() == expected


def test_golden_state_is_accepted_and_kept() -> None:
    original_state = rng_state(CPU)
    file = checkpoint("neox_pp1_mp1") / "mp_rank_00_model_states.pt"
    saved = load_tensors(file)
    try:
        restore_rng(saved, CPU, str(file))
        now = rng_state(CPU)
        assert now.keys() == {k for k in saved if k.endswith(("rng_state", "rng_tracker_states"))}
        assert torch.equal(now["torch_rng_state"], saved["torch_rng_state"])
        assert now["random_rng_state"] == saved["random_rng_state"]
        assert np.array_equal(now["np_rng_state"][1], saved["np_rng_state"][1])
    finally:
        restore_rng(original_state, CPU, "before")


def test_missing_or_foreign_state_is_refused() -> None:
    state = rng_state(CPU)
    for bad in ({}, {**state, "torch_rng_state": torch.zeros(16, dtype=torch.uint8)}, {**state, "np_rng_state": (1,)}):
        fails("no_load_rng: true", restore_rng, bad, CPU, "f")
    restore_rng(state, CPU, "f")
