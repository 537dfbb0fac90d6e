"""Distillation: the teacher scores every step's batch, or its most likely tokens are cached before the first
step.

In some steps the student may learn from text that it writes itself (GKD, arXiv 2306.13649).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron.data import Batch, Datasets, collation
from megatron.data.packed_dataset import TokenSample
from megatron.distributed import Watchdog, run_on_each_rank
from megatron.methods.distillation.cache import TeacherCache
from megatron.methods.distillation.description import TeacherDescription, describe_teacher, with_common_rows
from megatron.methods.distillation.keys import distillation_keys
from megatron.methods.distillation.objective import TeacherValues, distillation
from megatron.methods.distillation.on_policy import OnPolicy
from megatron.methods.distillation.teacher import Teacher
from megatron.mpu import Divergence, ParallelGroups, mix_seed
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.process import StopRequested
from megatron.tokenizer import Tokenizer, with_vocabulary
from megatron.training import method
from megatron.training.checkpoint.run_parts import RunParts
from megatron.training.checkpoint.source import adopt_vocabulary
from megatron.training.method import Collate, Load, LoggedSteps, MethodRun, StepData


class Method(method.Method):
    """Trains a student to match a teacher's next-token distributions on texts."""

    def __init__(self) -> None:
        self.teacher: TeacherDescription | None = None
        self.answer: OnPolicy | None = None

    def objective(self, args: NeoXArgs) -> Objective:
        """Returns the loss and metrics of distillation: the divergence from the teacher, mixed with
        next-token prediction."""
        keys = distillation_keys(args)
        divergence = Divergence(keys["beta"], keys["temperature"])
        objective = distillation(divergence, keys["weight"], args.softmax_rows)
        return objective if keys["cache"] else replace(objective, validated=("divergence",))

    def with_vocabulary(
        self, args: NeoXArgs, tokenizer: Tokenizer, groups: ParallelGroups, real_rows: int | None
    ) -> NeoXArgs:
        """Returns the configuration with the vocabulary size resolved, and the softmax limited to rows that
        both models have.

        Also reads the teacher's configuration into `self.teacher`. real_rows: number of the student's
        vocabulary rows that stand for tokens; None: not known.
        """
        self.teacher = teacher = run_on_each_rank(groups, lambda: describe_teacher(args, tokenizer))
        args = with_vocabulary(adopt_vocabulary(args, teacher.source, tokenizer.vocab_size), tokenizer)
        return with_common_rows(args, teacher, real_rows, tokenizer)

    def finish_datasets(self, parts: RunParts, datasets: Datasets, watchdog: Watchdog) -> Datasets:
        """Prepares the teacher, and returns the datasets.

        With `distillation.cache`, training samples get the teacher's cached scores. Without it, the engine
        will run the teacher in each step, and the datasets stay as they are.
        """
        args, groups, logger = parts.args, parts.groups, parts.logger
        assert self.teacher is not None
        watchdog.now("loading the teacher")
        if not distillation_keys(args)["cache"]:
            parts.engine.use_reference(Teacher(args, self.teacher, groups, logger).fill)
            return datasets
        try:
            cache = TeacherCache(args, groups, self.teacher, parts.tokenizer, logger, watchdog)
            return cache.fill(datasets)
        except StopRequested as stop:  # the run ends before its first step
            logger.info(
                f"distillation: {stop} ends the run before all rows have teacher scores; the next start reuses the "
                "scores cached so far"
            )
            return datasets

    def collation(self, args: NeoXArgs, eod: int | None) -> Collate:
        """Returns the collate function of the training set; it adds the teacher's cached scores to the
        batch."""
        return partial(_with_cached_scores, collation(args, eod))

    def begin(self, run: MethodRun) -> None:
        """Prepares the sampling of the student's answers, if the run has on-policy steps. Called before the
        first step."""
        if distillation_keys(run.args)["lmbda"] > 0.0:
            self.answer = OnPolicy(run)

    def steps(self, run: MethodRun, load: Load) -> Iterator[StepData]:
        """Yields the steps still to do. In on-policy steps the student's answers replace those of the
        data."""
        steps = super().steps(run, load)
        return steps if self.answer is None else self._on_policy_steps(run, self.answer, steps)

    def _on_policy_steps(self, run: MethodRun, answer: OnPolicy, steps: Iterator[StepData]) -> Iterator[StepData]:
        while True:
            if is_on_policy(run.args, run.iteration):
                yield StepData(answer(next(steps).take()), "on_policy")
            else:
                yield next(steps)

    def row(self, args: NeoXArgs, steps: LoggedSteps) -> Mapping[str, float]:
        """Returns the metric train/on_policy: the share of logged steps that were on-policy. Empty if `lmbda`
        is 0."""
        if not distillation_keys(args)["lmbda"]:
            return {}
        return {"train/on_policy": steps.roles.count("on_policy") / len(steps.roles)}


def is_on_policy(args: NeoXArgs, iteration: int) -> bool:
    """Returns whether the step after `iteration` is on-policy: the student learns from answers that it
    writes.

    This holds for a share `distillation.lmbda` of steps. Seed and iteration alone decide, so a resumed run
    takes the same steps.
    """
    return mix_seed(args.seed, "on_policy", iteration) / 2**63 < distillation_keys(args)["lmbda"]


def _with_cached_scores(collate: Collate, samples: Sequence[TokenSample], *length: int | None, **options: Any) -> Batch:
    """Collates samples to a batch, and adds the teacher's most likely tokens if the samples have them."""
    batch = collate(samples, *length, **options)
    tops = [sample.top for sample in samples if sample.top is not None]
    if not tops:
        return batch
    ids, logprobs = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*tops, strict=True))
    return replace(batch, method=TeacherValues(top_ids=ids, top_logprobs=logprobs))
