"""A training run: everything that it is made of, and what it offers to callbacks."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

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
from megatron.training.checkpoint.progress import TrainingProgress
from megatron.training.checkpoint.writer import CheckpointWriter
from megatron.training.engine import Engine
from megatron.training.loop_state import LoopState
from megatron.training.method import Method
from megatron.training.schedules import Schedule


@dataclass(frozen=True)
class Training:
    """Everything a training run is made of."""

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
    loop: LoopState = field(default_factory=LoopState)

    @property
    def iteration(self) -> int:
        """Optimizer steps done."""
        return self.progress.iteration

    @property
    def run_id(self) -> str:
        """The name of the run in its logs and checkpoints."""
        return self.checkpointer.run_id

    @property
    def consumed_samples(self) -> int:
        """Samples read so far."""
        return self.progress.consumed_samples

    @property
    def consumed_tokens(self) -> int:
        """Tokens read so far."""
        return self.progress.consumed_tokens

    @property
    def companion_files(self) -> Mapping[str, bytes]:
        """Files that came with an imported model."""
        return self.checkpointer.carried

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the work in a `with` block from the step's time, and clears the progress bar for it.

        On entry it waits for the step that has ended and writes its log line.
        """
        self.loop.settle()
        with self.loop.stopwatch.pause():
            self.loop.bar.clear()
            yield
            self.loop.bar.refresh()

    def stopping(self) -> bool:
        """Whether a stop signal has come to this rank."""
        return bool(self.loop.stop_signal or stop_signal())

    def request_stop(self, reason: str) -> None:
        """End the run with a checkpoint, once all ranks know of it."""
        self.loop.stop_request = reason

    def request_save(self) -> None:
        """Write a checkpoint, once all ranks know of it."""
        self.loop.save_request = True

    @contextmanager
    def inference(self) -> Iterator[Model]:
        """Gives a `with` block the current model, to generate and score with. All ranks enter it together.

        Training then continues as if the block had not run: random generators are restored.
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
        """Write the current model as a HuggingFace folder."""
        self.checkpointer.save_hf_model(folder, self.progress, {})

    def close(self) -> None:
        """Release the engine and leave the process group."""
        self.engine.close()
        self.groups.barrier()
        dist.destroy_process_group()
        self.watchdog.close()
