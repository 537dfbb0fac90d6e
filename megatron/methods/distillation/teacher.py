"""Runs the teacher of distillation: a second model on the same ranks, which scores every micro-batch."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch

from megatron.checkpointing import OpenCheckpoint, load_weights
from megatron.checkpointing.huggingface import hf_loader
from megatron.data import Batch
from megatron.distributed import run_on_each_rank
from megatron.methods.distillation.description import TeacherDescription, teacher_args
from megatron.methods.distillation.keys import distillation_keys
from megatron.methods.distillation.objective import with_teacher_values
from megatron.model import build_filled_stage, eager_blocks, forward_only, with_context
from megatron.mpu import DTYPES, HeadInput, ParallelGroups, TopTokens, top_tokens
from megatron.neox_arguments import NeoXArgs
from megatron.training.compile_blocks import compile_blocks
from megatron.training.metrics.run_metadata import local_sizes

T = TypeVar("T")


class Teacher:
    """This rank's pipeline stage of the teacher model. All ranks must call every method together."""

    def __init__(
        self, args: NeoXArgs, description: TeacherDescription, groups: ParallelGroups, logger: logging.Logger
    ) -> None:
        """Loads the teacher's weights.

        args: the student's configuration, with its vocabulary size resolved. Raises CheckpointError if the
            weights cannot be read, and ConfigError if the teacher cannot run in the student's layout.
        """
        keys = distillation_keys(args)
        groups = groups.with_replicated_experts()
        self.args, self.groups = teacher_args(args, description), groups
        self.temperature, self.top_k = keys["temperature"], keys["top_k"]
        self.columns, self.dtype = args.softmax_rows, DTYPES[args.params_dtype]
        path, is_hf = description.path, description.source.is_hf
        if is_hf:
            load = hf_loader(path, self.args)
        else:
            checkpoint = run_on_each_rank(groups, lambda: OpenCheckpoint(path))
            checkpoint.verify(groups=groups)
            load = partial(load_weights, checkpoint, self.args)
        self.stage = build_filled_stage(self.args, groups, load, logger.info, at_once=not is_hf).requires_grad_(False)
        compile_blocks(self.stage, self.args)
        size = local_sizes(self.args, groups, self.stage)[0] * self.dtype.itemsize
        logger.info(
            f"distillation: the teacher {path} takes {size / 2**30:.2f} GiB on this rank, in {self.args.params_dtype}"
            + (" (ZeRO does not shard it)" if args.zero_stage and groups.size("data_context") > 1 else "")
        )

    def fill(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches with the teacher's outputs in `TeacherValues`.

        With `top_k` the outputs are its most likely tokens, else its hidden states and head. Pipeline stages
        before the last return the micro-batches unchanged, because they compute no loss.
        """
        if self.top_k is not None:
            teacher_tokens = self.top_tokens(batches)
            return [with_top_tokens(batch, top) for batch, top in zip(batches, teacher_tokens, strict=False)] or batches
        heads = self._read(batches, lambda head, batch: head)
        return [with_teacher_values(batch, output=h.use) for batch, h in zip(batches, heads, strict=False)] or batches

    def top_tokens(self, batches: list[Batch]) -> list[TopTokens]:
        """Returns the teacher's most likely tokens at every position with a loss; [] on pipeline stages
        before the last."""
        assert self.top_k is not None
        read = partial(top_tokens, k=self.top_k, temperature=self.temperature, group=self.groups.group("tensor"))
        return self._read(batches, lambda head, batch: read(head, columns=self.columns, places=batch.loss_places))

    def _read(self, batches: Sequence[Batch], look: Callable[[HeadInput, Batch], T]) -> list[T]:
        results: list[T] = []

        def keep(head: HeadInput, batch: Batch) -> torch.Tensor:
            results.append(look(head, batch))
            return torch.zeros(1, device=self.groups.device)

        parts = [with_context(batch, self.args, self.groups) for batch in batches]
        with nullcontext() if self.stage.compiled else eager_blocks(self.stage):
            forward_only(
                self.stage, parts, self.args, self.groups, keep, dtype=self.dtype, shape=lambda batch: (1,)
            )  # fmt: skip
        return results


def with_top_tokens(batch: Batch, top: TopTokens) -> Batch:
    """Returns the batch with the teacher's most likely tokens in its `TeacherValues`.

    top: the tokens of all positions, flattened from `[seq, batch]`.
    """
    rows, seq = batch.tokens.shape
    ids, logprobs = (value.view(seq, rows, -1).transpose(0, 1).contiguous() for value in top)
    return with_teacher_values(batch, top_ids=ids, top_logprobs=logprobs)
