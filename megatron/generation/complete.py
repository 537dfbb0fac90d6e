"""The loop over tokens: prompts of different length, one forward for all of them, a token each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.data import Batch
from megatron.generation.model import Model
from megatron.generation.sampling import Sampling, next_tokens
from megatron.model import KVCache, forward_only
from megatron.model.positions import dynamic_ntk_limit
from megatron.mpu import gather_from_tensor


@dataclass(frozen=True)
class Completion:
    """tokens: generated ids, without the end of document; finished: whether that came; seconds: until the last one."""

    tokens: list[int]
    finished: bool
    seconds: float


class Step(NamedTuple):
    """A token more of every unfinished row. number: from 0; rows: which of the prompts; ended: whether it was the last
    one of its row, as the end of document always is."""

    number: int
    rows: list[int]
    tokens: list[int]
    ended: list[bool]


def next_logits(model: Model, tokens: Tensor, lengths: Tensor, cache: KVCache | None = None) -> Tensor:
    """fp32 logits `[rows, vocab]` of the token after the first `lengths[i]` ones of row i, the same on every rank.

    tokens: `[rows, width]` int64, what stands after a row's length is not looked at (attention is causal); lengths:
    `[rows]`; cache: is filled. Vocabulary rows that only pad the model to its tensor-parallel size are cut off.
    """
    return _logits(model, tokens[:, : int(lengths.max())], None, lengths - 1, cache)


def cached_logits(model: Model, tokens: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
    """`next_logits` by running each row's last token only: cache has all before it, and takes it in."""
    positions = (lengths - 1).unsqueeze(1)
    used = cache.first(int(lengths.max()))
    return _logits(model, tokens.gather(1, positions), positions, torch.zeros_like(lengths), used)


def _logits(model: Model, tokens: Tensor, positions: Tensor | None, last: Tensor, cache: KVCache | None) -> Tensor:
    groups, nothing = model.groups, torch.zeros_like(tokens)
    assert model.args.padded_vocab_size is not None
    shape = (len(tokens), model.args.padded_vocab_size)
    logits = forward_only(
        partial(model.stage, cache=cache, last=last.to(groups.device)),
        [Batch(tokens, labels=nothing, loss_weights=nothing, positions=positions)],
        model.args,
        groups,
        lambda logits, _: gather_from_tensor(logits[0].float(), groups.group("tensor")),
        dtype=model.dtype,
        shape=lambda _: shape,
    )
    return logits[0][:, : model.tokenizer.vocab_size]


def complete(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    maximum_tokens: int,
    seeds: Sequence[int],
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Completion]:
    """Continue prompts (none empty) until the end of document or `maximum_tokens`; together fitting the positions.

    seeds: one a prompt: what a row becomes depends on it, not on the rows beside it. All ranks of a model call it
    together with the same arguments. Keys and values are cached, unless `recompute` is set or dynamic NTK changes the
    rotary frequencies on the way. Raises CheckpointError when logits are not numbers.
    """
    begun = time.perf_counter()
    eod = model.tokenizer.eod
    starts = torch.tensor([len(prompt) for prompt in prompts])
    lengths = starts.clone()
    tokens = torch.full((len(prompts), int(starts.max()) + maximum_tokens), eod)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    finished, seconds = [False] * len(prompts), [0.0] * len(prompts)
    running = torch.arange(len(prompts))
    longest, limit = tokens.shape[1] - 1, dynamic_ntk_limit(model.args)
    # Keys in a cache would keep the frequencies of a shorter text.
    recompute = model.args.recompute or (limit is not None and longest > limit)
    cache = None if recompute else model.stage.empty_cache(len(prompts), longest)
    for step in range(maximum_tokens):
        if cache is None or step == 0:
            logits = next_logits(model, tokens[running], lengths[running], cache)
        else:
            logits = cached_logits(model, tokens[running], lengths[running], cache)
        if bool(logits.isnan().any()):
            raise CheckpointError(
                f"the model gives NaN as logits in {model.args.params_dtype}: the checkpoint's weights are damaged or "
                "precision cannot hold its activations; load another `iteration`, or set precision"
            )
        uniforms = torch.stack([torch.rand((), generator=draws[i], dtype=torch.float64) for i in running.tolist()])
        chosen = next_tokens(logits, sampling, uniforms.to(logits.device)).cpu()
        tokens[running, lengths[running]] = chosen
        lengths[running] += chosen != eod
        ended = (chosen == eod) | (step == maximum_tokens - 1)
        for row, token in zip(running[ended].tolist(), chosen[ended].tolist(), strict=True):
            finished[row], seconds[row] = token == eod, time.perf_counter() - begun
        on_step(Step(step, running.tolist(), chosen.tolist(), ended.tolist()))
        if ended.all():
            break
        if cache is not None and ended.any():
            cache = cache.keep(~ended)
        running = running[~ended]
    rows = zip(tokens, starts.tolist(), lengths.tolist(), finished, seconds, strict=True)
    return [Completion(row[start:end].tolist(), done, took) for row, start, end, done, took in rows]
