"""Stores the logits of a fixed batch in a checkpoint, and compares them after loading it.

The key `checkpoint_validation_with_forward_pass` turns this on.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing import CheckpointError, Manifest, OpenCheckpoint
from megatron.checkpointing.layout import LOGITS, model_files
from megatron.data import Batch
from megatron.distributed import run_on_all_ranks
from megatron.mpu import HeadInput
from megatron.training.engine import Engine

# Allowed difference, in units of the largest logit. Another layout, kernel or device stays below; a wrong
# weight is far above.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}


def fixed_logits(engine: Engine) -> Tensor | None:
    """Returns the logits of the tokens 0, 1, 2, ..., as GPT-NeoX's check uses them: `[seq, vocab/T]` on the
    CPU.

    None except on the last pipeline stage. All ranks call it together. T: number of tensor ranks.
    """
    tokens = torch.arange(engine.args.seq_length).remainder(engine.args.padded_vocab_size).unsqueeze(0)
    logits: list[Tensor] = []

    def keep(head: HeadInput, _: Batch) -> Tensor:
        logits.append(head.logits()[:, 0].cpu())
        return torch.zeros(1, device=head.hidden_states.device)

    no_labels = torch.zeros_like(tokens)
    engine.forward_only([Batch(tokens, no_labels, no_labels)], keep, lambda _: (1,))
    return logits[0] if logits else None


def check_forward(engine: Engine, checkpoint: OpenCheckpoint, say: Callable[[str], None]) -> None:
    """Compare the model's logits for the fixed batch with those stored in the checkpoint, in any layout.

    All ranks call it together. Raises CheckpointError with the largest difference if logits differ too much.
    """
    logits, groups, path = fixed_logits(engine), engine.groups, checkpoint.path

    def compare() -> tuple[float, float] | None:
        """Returns (largest difference, largest logit) over this rank's part of the vocabulary; None without
        logits."""
        has_states = logits is not None and model_files(path)
        parts = _stored(list(checkpoint.model_states().values()), checkpoint.manifest) if has_states else []
        if logits is None or not parts:
            return None
        rank, size = groups.rank("tensor"), groups.size("tensor")
        is_same_split = len(parts) == size
        if engine.args.score_head:  # replicated on every rank
            parts, is_same_split = parts[:1] * size, True
        stored = parts[rank] if is_same_split else torch.cat(parts, dim=-1).chunk(size, dim=-1)[rank]
        # The model is causal: if seq_length changed, the first logits still agree.
        rows = min(len(logits), len(stored))
        a, b = logits[:rows].float(), stored[:rows].float()
        return float((a - b).abs().nan_to_num(torch.inf).max()), float(b.abs().max())

    comparisons = [pair for pair in run_on_all_ranks(groups, compare) if pair is not None]
    if not comparisons:
        say(f"{path} holds no {LOGITS}, so it is not checked with a forward pass")
        return
    difference, largest = (max(values) for values in zip(*comparisons, strict=True))
    limit = TOLERANCE[engine.args.params_dtype] * largest
    if not difference <= limit:  # NaN too
        raise CheckpointError(
            f"{path}: logits of the fixed batch differ by up to {difference:.3g} from those it was saved with "
            f"(allowed: {limit:.3g}), so weights or model are not those that were saved: compare the config, load "
            "another `iteration`, or set checkpoint_validation_with_forward_pass: false"
        )
    say(f"{path} gives the logits it was saved with (largest difference {difference:.3g})")


def _stored(states: list[Mapping[str, Any]], manifest: Manifest | None) -> list[Tensor]:
    """Returns the stored logits: one part of the vocabulary for each tensor rank, in order.

    GPT-NeoX's files may hold more parts; only those of the last pipeline stage count. states: the model
    files.
    """
    parts = [state[LOGITS] for state in states if state.get(LOGITS) is not None]
    tensor = manifest.layout.tensor if manifest is not None else states[0].get("args", {}).get("model_parallel_size", 1)
    return parts[-tensor:]
