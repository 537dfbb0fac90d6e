"""The real model on ranks of the worker pool (no transformers here: ranks import this file)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from megatron.generation import SamplingParams, complete
from megatron.neox_arguments import NeoXArgs
from tests.generation.runs import model_of
from tests.model.stages import full_logits

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


def logits_and_text(
    rank: int, world_size: int, values: dict[str, Any], tokens: Tensor, prompts: Sequence[Sequence[int]], count: int
) -> tuple[Tensor, list[list[int]]] | None:
    """For the pool, of rank 0: logits `[batch, seq, vocab]`; at most `count` greedy tokens of each prompt."""
    model, sampling = model_of(NeoXArgs.from_dict(values)), SamplingParams()
    logits = full_logits(model.stage, model.args, model.groups, tokens, model.dtype)[..., : model.tokenizer.vocab_size]
    seeds = range(len(prompts))
    texts = complete(model, prompts, sampling, maximum_tokens=count, seeds=seeds) if prompts else []
    return (logits, [text.tokens for text in texts]) if rank == 0 else None
