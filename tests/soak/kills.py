"""Runs that die at a chosen moment, for the worker pool."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpointing import publish
from megatron.training import Training, train
from megatron.training.checkpoint import writer as saving
from megatron.training.deepspeed.optimizer_parts import OptimizerParts
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

    def step_with_signal(*given: Any) -> Any:
        if rank == to and training.progress.iteration + 1 == step:
            os.kill(os.getpid(), number)
        return train_step(*given)

    training.engine.train_step = step_with_signal  # type: ignore[method-assign]
    train(training)


def count_saves(training: Training) -> list[int]:
    """[saves begun]; with `async_save` a save begins when the one before is on disk."""
    begun, check = [0], training.checkpointer._check_space

    def counted(save: Path) -> bool:
        begun[0] += 1
        return check(save)

    training.checkpointer._check_space = counted  # type: ignore[method-assign]
    return begun


def run_and_die_saving(rank: int, world_size: int, run: dict[str, Any], moment: str, to: int) -> None:
    """Rank `to` is killed in the second save: as it copies weights (once they are copied), writes files (once
    the first is written, or half of it), renames the directory, or writes `latest`. Only rank 0 does the last
    two."""
    training = begin(run)
    begun = count_saves(training)

    def second(work: Callable[..., Any], counts: Callable[..., bool], before: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            dies = rank == to and begun[0] == 2 and counts(*args)
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
        gather = training.engine.gather_weights
        training.engine.gather_weights = second(  # type: ignore[method-assign]
            lambda *given: iter(list(gather(*given))), always, before=False
        )
    elif moment in ("write", "half a file"):
        saving.save_tensors = second(saving.save_tensors, always, before=False)
    elif moment == "rename":
        os.rename = second(os.rename, lambda source, target: "global_step" in str(target), before=True)
    elif moment == "latest":
        publish_module = __import__(publish.__module__, fromlist=["replace_file"])
        publish_module.replace_file = second(
            publish_module.replace_file, lambda path, data: Path(path).name == "latest", before=True
        )
    train(training)
    raise AssertionError(f"the run did not come to: {moment}")


def run_and_die_at(rank: int, world_size: int, run: dict[str, Any], nth: int) -> int:
    """Rank 0 is killed before the nth thing of its second save that gathers state or changes the disk; 0:
    never. Returns how many there are."""
    training = begin(run)
    begun, done = count_saves(training), [0]

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if rank == 0 and begun[0] == 2:
                done[0] += 1
                if done[0] == nth:
                    os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **kwargs)

        return wrapped

    # This process is the pool's throw-away fork.
    os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
    saving.save_tensors = counted(saving.save_tensors)
    training.engine.gather_weights = counted(training.engine.gather_weights)  # type: ignore[method-assign]
    OptimizerParts._collect = counted(OptimizerParts._collect)  # type: ignore[method-assign]
    train(training)
    return done[0]
