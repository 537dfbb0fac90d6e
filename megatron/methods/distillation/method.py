"""Distillation: the teacher scores every step, or its answers are cached before the first step.

A share of steps may learn from text that the student writes itself (GKD, arXiv 2306.13649).
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
    """Learns a teacher's distributions over the tokens of texts."""

    def __init__(self) -> None:
        self.teacher: TeacherDescription | None = None
        self.answer: OnPolicy | None = None

    def objective(self, args: NeoXArgs) -> Objective:
        """See `Method`."""
        keys = distillation_keys(args)
        divergence = Divergence(keys["beta"], keys["temperature"])
        objective = distillation(divergence, keys["weight"], args.softmax_rows)
        return objective if keys["cache"] else replace(objective, validated=("divergence",))

    def with_vocabulary(
        self, args: NeoXArgs, tokenizer: Tokenizer, groups: ParallelGroups, real_rows: int | None
    ) -> NeoXArgs:
        """Describes the teacher, and limits the softmax to rows that both models have."""
        self.teacher = teacher = run_on_each_rank(groups, lambda: describe_teacher(args, tokenizer))
        args = with_vocabulary(adopt_vocabulary(args, teacher.source, tokenizer.vocab_size), tokenizer)
        return with_common_rows(args, teacher, real_rows, tokenizer)

    def finish_datasets(self, parts: RunParts, datasets: Datasets, watchdog: Watchdog) -> Datasets:
        """Returns the sets, with `cache` with the teacher's scores. Else the engine runs the teacher in each
        step."""
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
            logger.info(f"distillation: given up, {stop} ends the run; scored rows are kept for the next start")
            return datasets

    def collation(self, args: NeoXArgs, eod: int | None) -> Collate:
        """See `Method`."""
        return partial(_with_cached_scores, collation(args, eod))

    def begin(self, run: MethodRun) -> None:
        """See `Method`."""
        if distillation_keys(run.args)["lmbda"] > 0.0:
            self.answer = OnPolicy(run)

    def steps(self, run: MethodRun, load: Load) -> Iterator[StepData]:
        """Yields the steps still to do; in on-policy steps the student answers the step's prompts."""
        steps = super().steps(run, load)
        return steps if self.answer is None else self._on_policy_steps(run, self.answer, steps)

    def _on_policy_steps(self, run: MethodRun, answer: OnPolicy, steps: Iterator[StepData]) -> Iterator[StepData]:
        while True:
            if is_on_policy(run.args, run.iteration):
                yield StepData(answer(next(steps).take()), "on_policy")
            else:
                yield next(steps)

    def row(self, args: NeoXArgs, steps: LoggedSteps) -> Mapping[str, float]:
        """See `Method`."""
        if not distillation_keys(args)["lmbda"]:
            return {}
        return {"train/on_policy": steps.roles.count("on_policy") / len(steps.roles)}


def is_on_policy(args: NeoXArgs, iteration: int) -> bool:
    """Returns whether the step after `iteration` is on policy; a share `distillation.lmbda` of steps is.

    Only seed and iteration decide, so that a resumed run takes the same steps.
    """
    return mix_seed(args.seed, "on_policy", iteration) / 2**63 < distillation_keys(args)["lmbda"]


def _with_cached_scores(collate: Collate, samples: Sequence[TokenSample], *length: int | None, **options: Any) -> Batch:
    """Returns the batch with the teacher's most likely tokens, where the samples have them."""
    batch = collate(samples, *length, **options)
    tops = [sample.top for sample in samples if sample.top is not None]
    if not tops:
        return batch
    ids, logprobs = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*tops, strict=True))
    return replace(batch, method=TeacherValues(top_ids=ids, top_logprobs=logprobs))
