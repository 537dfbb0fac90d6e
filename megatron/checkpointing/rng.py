"""Saves and restores states of random generators, under GPT-NeoX's keys, in types that load without code."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.errors import CheckpointError

KEYS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all random generators with `seed`, the same on every rank, as GPT-NeoX does.

    Training itself does not draw from them, but a program's callbacks may. With the same seed they draw the
    same numbers in every run. Checkpoints hold the generators' states, so these are the same too."""
    seed %= 1 << 32  # numpy's limit
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of Python's, numpy's, torch's and (on a GPU) CUDA's random generators, by key."""
    on_gpu = device.type == "cuda"
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state(),
        "rng_tracker_states": {},  # our dropout uses seeds in the batch instead of tracked generators
    }


def restore_rng(state: Mapping[str, Any], device: torch.device, file: str) -> None:
    """Set all random generators to the states that `rng_state` returned.

    file: the file that holds the states, for errors. Raises CheckpointError if a state is missing or
        unusable."""
    missing = [key for key in KEYS[:4] if key not in state]
    if missing:
        raise CheckpointError(
            f"{file}: lacks random states ({', '.join(missing)}); set no_load_rng: true to go on without them"
        )
    try:
        version, internal, gauss = state["random_rng_state"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["np_rng_state"]))
        torch.set_rng_state(state["torch_rng_state"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng_state"], device)
    except (TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(
            f"{file}: its random states cannot be used ({e}); set no_load_rng: true to go on without them"
        ) from e
