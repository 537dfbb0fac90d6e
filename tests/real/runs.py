"""The real model on ranks of the worker pool (no transformers here: ranks import this file)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.data import Batch
from megatron.generation import Model, SamplingParams, complete
from megatron.model import forward_only
from megatron.mpu import gather_from_tensor
from megatron.neox_arguments import NeoXArgs
from tests.generation.runs import model_of

# ranks, keys; 9 heads on 3 key-value heads divide by 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {"model_parallel_size": 1}),
    "tp3": (3, {"model_parallel_size": 3}),
    "pp2": (2, {"model_parallel_size": 1, "pipe_parallel_size": 2}),
}
END = "<|im_end|>"


def configured(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """The configuration that an import comes with, to load it; texts end where transformers ends them."""
    (file,) = checkpoint.glob("global_step*/configs/hf_model.yml")
    base_keys = {"load": str(checkpoint), "seq_length": 128, "eod_token": END, "attention_backend": "math"}
    return {**yaml.safe_load(file.read_text()), **base_keys, **changes}


def all_logits(model: Model, tokens: Tensor) -> Tensor:
    """`[batch, seq, vocab]` in fp32, the same on every rank."""
    groups, vocab = model.groups, model.args.padded_vocab_size
    assert vocab is not None
    return forward_only(
        model.stage, [Batch(tokens, tokens, torch.ones_like(tokens))], model.args, groups,
        lambda head, _: gather_from_tensor(head.logits(), groups.group("tensor")).transpose(0, 1),
        dtype=model.dtype, shape=lambda batch: (*batch.tokens.shape, vocab),
    )[0][..., : model.tokenizer.vocab_size]  # fmt: skip


def logits_and_text(
    rank: int, world_size: int, values: dict[str, Any], tokens: Tensor, prompts: Sequence[Sequence[int]], count: int
) -> tuple[Tensor, list[list[int]]] | None:
    """For the pool, of rank 0: `all_logits`, and at most `count` greedy tokens after each of the prompts."""
    model = model_of(NeoXArgs.from_dict(values))
    logits = all_logits(model, tokens)
    texts = (
        complete(model, prompts, SamplingParams(), maximum_tokens=count, seeds=range(len(prompts))) if prompts else []
    )
    return (logits, [text.tokens for text in texts]) if rank == 0 else None
