"""The loop over tokens: prompts of different length, one forward for all of them, a token each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.data import Batch
from megatron.generation.model import Model
from megatron.generation.sampling import Sampling, next_tokens
from megatron.model import forward_only, next_token_logits


@dataclass(frozen=True)
class Completion:
    """tokens: generated ids, without the end of document; finished: whether that came; seconds: until the last one."""

    tokens: list[int]
    finished: bool
    seconds: float


def next_logits(model: Model, tokens: Tensor, lengths: Tensor) -> Tensor:
    """fp32 logits `[rows, vocab]` of the token after the first `lengths[i]` ones of row i, the same on every rank.

    tokens: `[rows, width]` int64, what stands after a row's length is not looked at (attention is causal); lengths:
    `[rows]`. Vocabulary rows that only pad the model to its tensor-parallel size are cut off.
    """
    args, groups = model.args, model.groups
    used = int(lengths.max())
    width = -(-used // groups.size("tensor")) * groups.size("tensor") if args.sequence_parallel else used
    tokens = torch.nn.functional.pad(tokens[:, :used], (0, width - used), value=model.tokenizer.eod)
    # Columns added for sequence parallelism may stand behind the last position there is.
    positions = torch.arange(width).clamp(max=args.max_position_embeddings - 1).expand_as(tokens)
    nothing = torch.zeros_like(tokens)
    batch = Batch(tokens, labels=nothing, loss_weights=nothing, positions=positions)
    last = (lengths - 1).to(groups.device)
    assert args.padded_vocab_size is not None
    shape = (len(tokens), args.padded_vocab_size)
    read = next_token_logits(groups, lambda _: last)
    logits = forward_only(model.stage, [batch], args, groups, read, dtype=model.dtype, shape=lambda _: shape)[0]
    return logits[:, : model.tokenizer.vocab_size]


def complete(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    maximum_tokens: int,
    seeds: Sequence[int],
    on_tokens: Callable[[int, int, int], None] = lambda step, tokens, ended: None,
) -> list[Completion]:
    """Continue prompts (none empty) until the end of document or `maximum_tokens`; together fitting the positions.

    seeds: one a prompt: what a row becomes depends on it, not on the rows beside it. on_tokens: told after each step
    its number, how many tokens came and how many rows ended. All ranks of a model call it together with the same
    arguments. Raises CheckpointError when logits are not numbers.
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
    for step in range(maximum_tokens):
        logits = next_logits(model, tokens[running], lengths[running])
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
        on_tokens(step, len(running), int(ended.sum()))
        running = running[~ended]
        if not len(running):
            break
    rows = zip(tokens, starts.tolist(), lengths.tolist(), finished, seconds, strict=True)
    return [Completion(row[start:end].tolist(), done, took) for row, start, end, done, took in rows]
