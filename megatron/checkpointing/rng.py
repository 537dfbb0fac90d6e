"""States of the random generators, under GPT-NeoX's keys and in types that load without running code."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.errors import CheckpointError

KEYS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all random generators with `seed`, on every rank alike, as GPT-NeoX does.

    Training itself does not draw from them, a program's callbacks may: these then give the same numbers in
    every run, and checkpoints, which hold the generators' states, have the same content.
    """
    seed %= 1 << 32  # all that numpy takes
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's, torch's and the device's generators; on a CPU the device's is
    torch's."""
    on_gpu = device.type == "cuda"
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state(),
        "rng_tracker_states": {},  # dropout here follows from seeds in the batch, not from tracked generators
    }


def restore_rng(state: Mapping[str, Any], device: torch.device, where: str) -> None:
    """Set all random generators to the states that `rng_state` gave; where: the file, for errors.

    Raises CheckpointError when a state is missing or of another kind of device.
    """
    missing = [key for key in KEYS[:4] if key not in state]
    if missing:
        raise CheckpointError(f"{where}: no {', '.join(missing)}; set no_load_rng: true")
    try:
        version, internal, gauss = state["random_rng_state"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["np_rng_state"]))
        torch.set_rng_state(state["torch_rng_state"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng_state"], device)
    except (TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"{where}: random states of another kind of machine ({e}); set no_load_rng: true") from e
