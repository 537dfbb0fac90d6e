"""Reads the files of a past or present run: its metrics, checkpoints, and the samples of each step."""

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from megatron.checkpointing import Manifest, list_checkpoints, read_manifest
from megatron.checkpointing.huggingface import is_hf
from megatron.checkpointing.layout import step_of
from megatron.checkpointing.saved_config import checkpoint_args
from megatron.experiments.errors import RunError
from megatron.neox_arguments import NeoXArgs
from megatron.operations.run_folder import RunFolder, open_run
from megatron.process.run_files import Problems
from megatron.training.split_steps import read_split_file


@dataclass(frozen=True)
class Span:
    """Consecutive steps of a run that read batches of one size, with one configuration.

    start, last: the first and the last of these steps, counted from 1.
    consumed: training samples that earlier steps have read.
    batch: samples of a step. checkpoint: the step of the checkpoint that has the configuration.
    """

    start: int
    last: int
    consumed: int
    batch: int
    checkpoint: int

    def samples(self, step: int) -> range:
        """Returns the numbers of a step's samples in the training order."""
        sample = self.consumed + (step - self.start) * self.batch
        return range(sample, sample + self.batch)


@dataclass
class PastRun:
    """A run in its folder `save`. Steps are counted from 1; the checkpoint of step N has seen N steps.

    path: the folder. folder: its status, summary and metrics.
    """

    path: Path
    folder: RunFolder = field(repr=False)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Returns the run of a folder: its `save`, its log folder or its metrics.jsonl.

        Raises UserError if no run is there, or if it has no checkpoint, which alone has its configuration.
        """
        folder = open_run(path)
        if folder.save is None:
            raise RunError(f"{path}: the checkpoints of this run are not here; give its `save`, a local folder")
        run = cls(folder.save, folder)
        if not run.checkpoints:
            raise RunError(f"{run.path}: holds no checkpoint, so the run's configuration is unknown; save one")
        return run

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of the run's checkpoints, by step, in order."""
        return {step_of(path): path for path in list_checkpoints(self.path)}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order of their steps, each {metric: number} with `iteration`.

        `pandas.DataFrame(run.metrics)` makes a table of them.
        """
        return self.folder.rows()

    @property
    def config(self) -> NeoXArgs:
        """The run's configuration, as its last checkpoint saved it."""
        return self.args_at(max(self.checkpoints))

    @property
    def last_step(self) -> int:
        """The last step that the run has finished, as far as its files say."""
        logged = self.folder.status().get("iteration") or 0
        return max(logged, *self.checkpoints)

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of the checkpoint of `step`. Raises RunError if no run wrote it."""
        manifest = self._manifests.get(step)
        if manifest is None:
            manifest = self._manifests[step] = read_manifest(self.checkpoints[step])  # type: ignore[assignment]
        if manifest is None or not manifest.data:
            reason = "was written by a conversion or by GPT-NeoX, so it has no record of a run and its data"
            raise RunError(f"{self.checkpoints[step]}: {reason}; give a folder in which a run has saved")
        return manifest

    @cached_property
    def _manifests(self) -> dict[int, Manifest]:
        return {}

    @cached_property
    def _args(self) -> dict[str, NeoXArgs]:
        return {}

    def args_at(self, checkpoint: int) -> NeoXArgs:
        """Returns the configuration in the checkpoint of a step, for the run's number of ranks."""
        manifest = self.manifest(checkpoint)
        ranks = manifest.layout.world_size
        key = json.dumps([manifest.config, ranks], sort_keys=True, default=list)
        if key not in self._args:
            self._args[key] = checkpoint_args(self.checkpoints[checkpoint]).for_world(ranks)
        return self._args[key]

    @cached_property
    def spans(self) -> list[Span]:
        """The steps of the run up to its planned end, by configuration and batch size.

        A process that takes a step saves the next checkpoint, so that one has the step's configuration.
        Raises RunError if checkpoints do not say which samples the steps between them have read.
        """
        spans: list[Span] = []
        step, consumed = self._steps_of_others(), 0
        for checkpoint in self.checkpoints:
            manifest, batch = self.manifest(checkpoint), self.args_at(checkpoint).train_batch_size
            if not spans and step:
                consumed = manifest.consumed_samples - (checkpoint - step) * batch
            if manifest.consumed_samples != consumed + (checkpoint - step) * batch:
                raise RunError(
                    f"{self.checkpoints[checkpoint]}: its run had read {manifest.consumed_samples} samples, which are "
                    f"not the {consumed} of step {step} and {checkpoint - step} steps of train_batch_size {batch}; a "
                    "checkpoint at which the batch changed was deleted, or these steps were another run's"
                )
            spans.append(Span(step + 1, checkpoint, consumed, batch, checkpoint))
            step, consumed = checkpoint, manifest.consumed_samples
        if not self._reads_batches_of(step, consumed, self.args_at(step).train_batch_size):
            return [span for span in spans if span.last >= span.start]
        planned = max(self.config.train_iters or self.folder.status().get("train_iters") or 0, self.last_step)
        spans.append(Span(step + 1, planned, consumed, self.args_at(step).train_batch_size, step))
        return [span for span in spans if span.last >= span.start]

    def _reads_batches_of(self, step: int, consumed: int, batch: int) -> bool:
        """Returns whether logged steps after the last checkpoint, `step`, have read batches of this size."""
        return all(
            row["consumed_samples"] == consumed + (row["iteration"] - step) * batch
            for row in self.metrics if row["iteration"] > step and "consumed_samples" in row
        )  # fmt: skip

    @cached_property
    def split_steps(self) -> frozenset[int]:
        """The steps that the run has split after running out of memory."""
        return frozenset(read_split_file(self.path, Problems()).get("steps") or ())

    def _steps_of_others(self) -> int:
        """Returns how many steps the run that this one goes on from had taken; 0 for a run of its own."""
        args, key = self.args_at(min(self.checkpoints)), "train/lm_loss"
        if args.load is None or args.finetune or is_hf(args.load):
            return 0
        if args.branched_from is not None:
            return int(args.branched_from["iteration"])
        if Path(args.load_dir or "").resolve() == Path(args.save_dir or "").resolve():
            return 0
        logged = next((row["iteration"] for row in self.metrics if key in row), min(self.checkpoints))
        return max(0, logged - args.log_interval)

    def span_of(self, step: int) -> Span:
        """Returns the span that has a step. Raises RunError for a step that the run does not have."""
        spans = self.spans
        if not spans or not spans[0].start <= step <= spans[-1].last:
            steps = f"its steps are {spans[0].start} to {spans[-1].last}" if spans else "it has none"
            parent = (
                f"; earlier ones are of the run that it loads, {self.config.load}"
                if spans and spans[0].start > 1
                else ""
            )
            raise RunError(f"{self.path}: has no step {step}: {steps}{parent}")
        return spans[bisect_left(spans, step, key=lambda span: span.last)]

    def weights_before(self, step: int) -> int:
        """Returns the last checkpoint before a step: step N-1, or an earlier one.

        Raises RunError if there is none.
        """
        earlier = [saved for saved in self.checkpoints if saved < step]
        if not earlier:
            raise RunError(
                f"{self.path}: no checkpoint from before step {step}, the first is {min(self.checkpoints)}; give "
                "--checkpoint, or save more of them next time (extra_save_iters: [0] for the weights of the start)"
            )
        return earlier[-1]
