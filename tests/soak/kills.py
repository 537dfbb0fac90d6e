"""Runs that die at a chosen moment, for the worker pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpointing import publish
from megatron.training import engine, train
from tests.training.runs import ADAMW, NEOX, begin, config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "tp2": (2, {"model_parallel_size": 2}),
    "pp2": (2, {"pipe_parallel_size": 2}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
}
STEPS, SAVE_EVERY = 6, 2
SAVING = ("copy", "write", "half a file", "rename", "latest")


def values(save: Path, layout: str, **more: Any) -> dict[str, Any]:
    """A short run with dropout, so that every generator counts."""
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    where = {"save": str(save), "load": str(save)}
    small = {
        "num_layers": 2,
        "train_micro_batch_size_per_gpu": 4,
        "train_iters": STEPS,
        "checkpoint_factor": SAVE_EVERY,
    }
    return config(NEOX, ADAMW, dropout, LAYOUTS[layout][1], small, where, more)


def run_and_get_signal(rank: int, world_size: int, run: dict[str, Any], number: int, step: int, to: int) -> None:
    """Rank `to` gets a signal as step `step` begins."""
    training = begin(run)
    train_step = training.engine.train_step

    def step_with_signal(batches: Any, lr: float) -> Any:
        if rank == to and training.progress.iteration + 1 == step:
            os.kill(os.getpid(), number)
        return train_step(batches, lr)

    training.engine.train_step = step_with_signal  # type: ignore[method-assign]
    train(training)


def run_and_die_saving(rank: int, world_size: int, run: dict[str, Any], moment: str, to: int) -> None:
    """Rank `to` is killed in the second save: as it copies weights (once they are copied), writes files (once the first
    is written, or half of it), renames the directory, or writes `latest`. Only rank 0 does the last two."""
    training = begin(run)

    def second(work: Callable[..., Any], counts: Callable[..., bool], before: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            dies = rank == to and training.progress.iteration == 2 * SAVE_EVERY and counts(*args)
            if dies and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = work(*args, **kwargs)
            if dies:
                if moment == "half a file":
                    os.truncate(args[1], os.path.getsize(args[1]) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    def always(*args: Any) -> bool:
        return True

    # This process is the pool's throw-away fork.
    if moment == "copy":
        training.engine.weights = second(training.engine.weights, always, before=False)  # type: ignore[method-assign]
    elif moment in ("write", "half a file"):
        engine.save_tensors = second(engine.save_tensors, always, before=False)
    elif moment == "rename":
        os.rename = second(os.rename, lambda source, target: "global_step" in str(target), before=True)
    elif moment == "latest":
        publish_module = __import__(publish.__module__, fromlist=["replace_file"])
        publish_module.replace_file = second(
            publish_module.replace_file, lambda path, data: Path(path).name == "latest", before=True
        )
    train(training)
    raise AssertionError(f"the run did not come to: {moment}")
