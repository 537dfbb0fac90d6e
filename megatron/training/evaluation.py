"""Validation and test loss, in every layout, also for sets smaller than a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data import Batch, SampleSet, eval_batches
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Engine


@dataclass(frozen=True)
class Evaluation:
    """lm_loss: mean over weighted tokens, nats. unigram_entropy: of their labels, nats: what a model that knows only
    token frequencies reaches."""

    lm_loss: float
    unigram_entropy: float

    @property
    def perplexity(self) -> float:
        """exp(lm_loss), capped as upstream."""
        return math.exp(min(20.0, self.lm_loss))


def evaluate(
    engine: Engine, dataset: SampleSet, num_samples: int, args: NeoXArgs, groups: ParallelGroups, eod: int | None
) -> Evaluation:
    """Loss over the first `num_samples` samples (all, when there are fewer)."""
    totals = torch.zeros(2, dtype=torch.float64)
    counts = torch.zeros(args.padded_vocab_size, dtype=torch.int64)
    batches = eval_batches(
        dataset,
        num_samples,
        args.train_micro_batch_size_per_gpu,
        groups.rank("data"),
        groups.size("data"),
        eod=eod,
        eod_mask_loss=args.eod_mask_loss,
    )
    for chunk in _chunks(batches, args.gradient_accumulation_steps or 1):
        for batch, logprobs in zip(chunk, engine.token_logprobs(chunk), strict=True):
            weights = batch.loss_weights.double()
            totals += torch.stack([-(logprobs.double().cpu() * weights).sum(), weights.sum()])
            counts += batch.labels[batch.loss_weights > 0].bincount(minlength=len(counts))
    if groups.group("data") is not None:
        totals, counts = totals.to(groups.device), counts.to(groups.device)
        dist.all_reduce(totals, group=groups.group("data"))
        dist.all_reduce(counts, group=groups.group("data"))
    seen = counts[counts > 0].double()
    shares = seen / seen.sum()
    return Evaluation(float(totals[0] / totals[1].clamp(min=1.0)), float(-(shares * shares.log()).sum()))


def _chunks(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    chunk: list[Batch] = []
    for batch in batches:
        chunk.append(batch)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
