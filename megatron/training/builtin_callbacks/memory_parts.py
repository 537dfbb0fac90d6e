"""Measures the peak memory of one step by part, on every rank: `profile_memory`."""

from contextlib import ExitStack
from typing import Any

import torch

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.data import Batch
from megatron.data.files import write_json
from megatron.distributed import on_rank_zero, run_on_all_ranks
from megatron.process.metrics_file import MEMORY_FILE
from megatron.training.metrics.loggers import log_directory
from megatron.training.metrics.memory_tracker import MemoryTracker
from megatron.training.run import Training


class MemoryParts(Callback):
    """Measures the memory of step `profile_memory` and writes `memory_parts.json`. Other steps cost nothing.

    The file has `iteration`, `device` and `compile`; `ranks`, with the peak and its parts on each rank; and
    `timeline`, of the rank with the highest peak.
    """

    def __init__(self, training: Training) -> None:
        """Raises ConfigError if `profile_memory` is after the last step, or no folder for the file is set.

        Also raises it if blocks are compiled on a CPU, where their memory cannot be measured.
        """
        args, self._training, self._open = training.args, training, ExitStack()
        folder, self._iteration = log_directory(args), args.profile_memory
        self._tracker: MemoryTracker | None = None
        if folder is None:
            raise args.error("profile_memory", f"no folder is set for {MEMORY_FILE}; set log_dir or save")
        if self._iteration is not None and self._iteration > args.train_iters:
            place = args.cite("train_iters")
            raise args.error(
                "profile_memory", f"{self._iteration} is after the last step, train_iters {place}; set an earlier step"
            )
        if args.compile and training.groups.device.type == "cpu":
            place = args.origin("compile")
            raise args.error(
                "profile_memory",
                f"the memory of compiled blocks cannot be measured on a CPU; set compile: false ({place})",
            )
        self._file = folder / MEMORY_FILE

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> None:
        """Begin to measure memory, if the step that begins is `profile_memory`."""
        if run.iteration + 1 != self._iteration:
            return
        engine, device = self._training.engine, self._training.groups.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._tracker = MemoryTracker(device, engine.tensors, bool(run.args.compile))
        self._open.enter_context(self._tracker.watching(engine.stage))

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """After the measured step, write the file and log the peak."""
        if self._tracker is None:
            return
        self._open.close()
        tracker, self._tracker = self._tracker, None
        with run.pause():
            measurements = run_on_all_ranks(run.groups, lambda: self._measured(tracker))
            on_rank_zero(run.groups, lambda: self._write(measurements))
        fullest = max(measurements, key=lambda rank: rank["peak"])
        parts = ", ".join(f"{part} {size / 2**20:,.1f}" for part, size in fullest["parts"].items() if size)
        run.logger.info(
            f"profile_memory: at the peak of iteration {self._iteration} rank {fullest['rank']} held "
            f"{fullest['peak'] / 2**20:,.1f} MiB: {parts}; {self._file}"
        )

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Stop measuring memory."""
        self.close()

    def close(self) -> None:
        """Stop measuring memory."""
        self._open.close()
        self._tracker = None

    def _measured(self, tracker: MemoryTracker) -> dict[str, Any]:
        """Returns this rank's `peak` in bytes, `parts`, the bytes of each part at the peak, and `timeline`.

        On a GPU the peak is the allocator's. Memory that the tracker did not count is a part named "other
        (...)".
        """
        groups, tracked = self._training.groups, tracker.timeline()
        parts, peak = dict(tracked.parts), tracked.peak
        if groups.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(groups.device)
            unseen = "compiled code, allocator, libraries" if self._training.args.compile else "allocator, libraries"
            parts[f"other ({unseen})"] = peak - tracked.peak
        content = {"changes": tracked.changes, "moments": tracked.moments, "parts": tracked.bytes_by_part}
        return {"rank": groups.world_rank, "peak": peak, "parts": parts, "timeline": content}

    def _write(self, measurements: list[dict[str, Any]]) -> None:
        groups, args = self._training.groups, self._training.args
        cuda = groups.device.type == "cuda"
        fullest = max(measurements, key=lambda rank: rank["peak"])
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "iteration": self._iteration,
            "device": torch.cuda.get_device_name(groups.device) if cuda else "cpu",
            "compile": args.compile,
            "ranks": [{key: value for key, value in rank.items() if key != "timeline"} for rank in measurements],
            "timeline": {"rank": fullest["rank"], **fullest["timeline"]},
        }
        write_json(self._file, content)
