"""Defines `Training`, a training run: its parts, the state of its loop, and its interface to callbacks."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from megatron.callbacks import Callback
from megatron.checkpointing import restore_rng, rng_state
from megatron.checkpointing.huggingface import declared_eos_ids, exported_vocab_size
from megatron.data import Datasets
from megatron.distributed import Watchdog
from megatron.model import Model, for_inference, inference_mode
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process import stop_signal
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.local_saves import LocalSaves
from megatron.training.checkpoint.run_parts import TrainingProgress
from megatron.training.checkpoint.writer import CheckpointWriter
from megatron.training.engine import Engine
from megatron.training.method import Method
from megatron.training.schedules import Schedule


class Stopwatch:
    """Measures wall-clock seconds of training. Code within `pause()` (validation, saving) does not count."""

    def __init__(self) -> None:
        self._lap_start = time.perf_counter()
        self._paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stops the clock during a `with` block. Blocks may be nested."""
        if self._paused:
            yield
            return
        pause_start, self._paused = time.perf_counter(), True
        try:
            yield
        finally:
            self._lap_start += time.perf_counter() - pause_start
            self._paused = False

    def lap(self) -> float:
        """Returns the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._lap_start = now - self._lap_start, now
        return seconds


@dataclass
class LoopState:
    """The state of a training loop that checkpoints do not save.

    stop_reason: why the run ends after this step; None while it continues.
    save_is_due: a checkpoint is due by the clock or by request.
    stop_request, save_request: requests by callbacks of this rank that other ranks do not know of yet.
    stop_signal: number of a stop signal that some rank has received and all ranks know of; 0: none.
    gave_up: a stop signal made the run skip work of this step, such as its validation.
    look_for_stop, agree_on_stop: methods of `StopCallback`, which long work calls.
    settle: waits for the step's result and writes its log line.
    stopwatch: measures the time of steps. bar: the progress bar.
    ending: (status, reason) of a run that did not fail, once it is over.
    step_under_way: number of the step that the engine takes now; None: it takes none.
    split_steps: numbers of steps that are taken in smaller micro-batches (`on_out_of_memory`).
    """

    stop_reason: str | None = None
    save_is_due: bool = False
    stop_request: str | None = None
    save_request: bool = False
    stop_signal: int = 0
    gave_up: bool = False
    look_for_stop: Callable[[], None] = lambda: None
    agree_on_stop: Callable[[], None] = lambda: None
    settle: Callable[[], None] = lambda: None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))
    ending: tuple[str, str | None] | None = None
    step_under_way: int | None = None
    split_steps: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Training:
    """A training run: all of its parts, and the methods that callbacks may call (`TrainingRun`)."""

    args: NeoXArgs
    method: Method
    groups: ParallelGroups
    tokenizer: Tokenizer
    datasets: Datasets
    engine: Engine
    schedule: Schedule
    checkpointer: CheckpointWriter
    progress: TrainingProgress
    logger: logging.Logger
    watchdog: Watchdog
    user_callbacks: Sequence[Callback] = ()
    zero_tokens: frozenset[int] | None = None  # of Origin
    local_saves: LocalSaves | None = None
    loop: LoopState = field(default_factory=LoopState)

    @property
    def iteration(self) -> int:
        """The number of optimizer steps done."""
        return self.progress.iteration

    @property
    def run_id(self) -> str:
        """The name of the run in its logs and checkpoints."""
        return self.checkpointer.run_id

    @property
    def consumed_samples(self) -> int:
        """The number of training samples read so far."""
        return self.progress.consumed_samples

    @property
    def consumed_tokens(self) -> int:
        """The number of training tokens read so far."""
        return self.progress.consumed_tokens

    @property
    def companion_files(self) -> Mapping[str, bytes]:
        """Files of an imported HuggingFace model besides its weights, content by name. {} if there is
        none."""
        return self.checkpointer.carried

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes a `with` block from the measured time of steps, and clears the progress bar for it.

        On entry it waits for the last step and writes that step's log line.
        """
        self.loop.settle()
        with self.loop.stopwatch.pause():
            self.loop.bar.clear()
            yield
            self.loop.bar.refresh()

    def stopping(self) -> bool:
        """Returns whether a stop signal has come to this rank, or to another one and all ranks know of it."""
        return bool(self.loop.stop_signal or stop_signal())

    def request_stop(self, reason: str) -> None:
        """Ask the run to save and end, a step or two from now, when all ranks know of the request."""
        self.loop.stop_request = reason

    def request_save(self) -> None:
        """Ask the run to save a checkpoint, a step or two from now, when all ranks know of the request."""
        self.loop.save_request = True

    @contextmanager
    def inference(self) -> Iterator[Model]:
        """Gives a `with` block the current model, to generate and score with. All ranks enter it together.

        Afterwards random generators are restored, so training continues as if the block had not run.
        """
        carried, engine, args = self.checkpointer.carried, self.engine, for_inference(self.args)
        rows, ends = exported_vocab_size(carried, self.tokenizer.vocab_size), declared_eos_ids(carried)
        random = rng_state(self.groups.device)
        lockstep = engine.zero_stage == 3 or self.groups.size("expert") > 1
        try:
            with inference_mode(engine.stage):
                yield Model(
                    args, self.groups, self.tokenizer, engine.stage, engine.dtype, rows, lockstep, declared_eos_ids=ends
                )
        finally:
            restore_rng(random, self.groups.device, "before inference")

    def save_hf_model(self, folder: Path) -> None:
        """Write the current model in HuggingFace's format to `folder`."""
        self.checkpointer.save_hf_model(folder, self.progress, {})

    def close(self) -> None:
        """Release the engine and leave the process group."""
        self.engine.close()
        self.groups.barrier()
        dist.destroy_process_group()
        self.watchdog.close()
