"""Runs a window of steps under torch's profiler, and takes a snapshot of GPU memory at its end.

Each rank writes its own file.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.callbacks import Callback, TrainingRun
from megatron.data import Batch
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.local_paths import with_home
from megatron.training.metrics.loggers import log_directory

HISTORY = 100_000  # number of allocations and frees in a snapshot


def record_memory_history(args: NeoXArgs, groups: ParallelGroups) -> None:
    """With `memory_profiling`, start to record allocations of GPU memory. Called before the model is
    built."""
    if args.memory_profiling and groups.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)


class StepProfiler(Callback):
    """Profiles a window of steps.

    `profile` traces the steps after iteration `profile_step_start`, up to and including `profile_step_stop`.
    TensorBoard and chrome://tracing read the traces. The window is also a range for `nsys
    --capture-range=cudaProfilerApi`. Traces have Python stacks and module names if collectives are NCCL's
    (`_can_trace_python`).

    `memory_profiling` writes torch.cuda's snapshot at the end of the window (pytorch.org/memory_viz), or when
    the run ends earlier, even by running out of memory. A CPU has no such snapshot: a trace shows its
    allocations.
    """

    def __init__(
        self, args: NeoXArgs, groups: ParallelGroups, logger: logging.Logger, settle: Callable[[], None]
    ) -> None:
        """Choose the folders for traces and snapshots. Raises ConfigError if none is set.

        settle: waits for collectives that run between steps. They must end before the trace does, because
            gloo's threads write into records that torch then frees.
        """
        self._logger, self._rank, self._settle = logger, groups.world_rank, settle
        self._start, self._last = args.profile_step_start, args.profile_step_stop
        cuda = groups.device.type == "cuda"
        self._nsys = cuda and args.profile
        self._snapshot: Path | None = None
        self._traces: Path | None = None
        self._profile: torch.profiler.profile | None = None
        if args.profile:
            self._traces = _folder(args, "profile", args.tensorboard_dir)
        if args.memory_profiling and cuda:
            self._snapshot = _folder(args, "memory_profiling", args.memory_profiling_path)
        elif args.memory_profiling and self._traces is None:
            self._traces = _folder(args, "memory_profiling", args.memory_profiling_path)
        self._python = _can_trace_python()
        if self._traces is not None and not self._python:
            logger.info("profile: traces have no Python stacks, because recording them can crash a run that uses gloo")
        if args.memory_profiling and not cuda:
            logger.info("memory_profiling: without a GPU there is no snapshot; the profiler's trace shows allocations")

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> None:
        """Begin, continue or end the window. The loader's workers exist by now, so none is forked during a
        trace."""
        self.before_step(run.iteration)

    def before_step(self, iteration: int) -> None:
        """Begin, continue or end the window of profiled steps. iteration: number of steps done so far."""
        if self._profile is not None:
            if iteration == self._last:
                self._settle()
            self._profile.step()
        elif self._traces is not None and self._start - 1 <= iteration < self._last:
            self._begin_trace(iteration, self._traces)
        if self._nsys and iteration == self._start:
            torch.cuda.cudart().cudaProfilerStart()
        if iteration == self._last:
            self.close()

    def _begin_trace(self, iteration: int, folder: Path) -> None:
        warm_up = 1 if iteration < self._start else 0
        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=warm_up, active=self._last - iteration - warm_up, repeat=1),
            on_trace_ready=_write_trace(folder, self._rank),
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
            with_modules=self._python,
            with_stack=self._python,
        )
        self._profile.start()

    def close(self) -> None:
        """End the window of profiled steps, if it has begun, and write trace and snapshot."""
        if self._profile is not None:
            self._profile.stop()
            self._logger.info(f"profile: traces are in {self._traces}")
            self._profile = self._traces = None
        if self._nsys:
            torch.cuda.cudart().cudaProfilerStop()
            self._nsys = False
        if self._snapshot is not None:
            self._snapshot.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._snapshot / f"mem_snapshot_rank{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._logger.info(f"memory_profiling: snapshots are in {self._snapshot}")
            self._snapshot = None


def _can_trace_python() -> bool:
    """Returns whether torch's profiler can record Python stacks safely: with NCCL or one process, not with
    gloo.

    The profiler walks the interpreter's list of threads without its lock, while gloo's threads enter and
    leave Python to release tensors. It can meet a thread that is not filled in yet (before CPython 3.12) or
    already freed (before 3.14.1, python/cpython#137400).
    """
    return not dist.is_initialized() or dist.get_backend() == "nccl"


def _folder(args: NeoXArgs, key: str, configured: str | None) -> Path:
    logs = log_directory(args)
    if configured is not None:
        return with_home(configured)
    if logs is not None:
        return logs / "profile"
    folder_key = "tensorboard_dir" if key == "profile" else "memory_profiling_path"
    raise args.error(key, f"no folder is set for its files; set {folder_key}, log_dir or save")


def _write_trace(folder: Path, rank: int) -> Callable[[torch.profiler.profile], None]:
    folder.mkdir(parents=True, exist_ok=True)
    return torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}")
