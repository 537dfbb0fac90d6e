"""Checks that a HuggingFace folder and a NeoX model have the same weights and logits for a fixed batch.

transformers loads the folder by `from_pretrained` (`transformers_model.py`). Both models compute in fp32.
Each module gets its weights in fp32 only during its forward pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.convert import to_hf
from megatron.checkpointing.families.registry import FAMILIES, family_of
from megatron.checkpointing.huggingface.folder import HFFolder
from megatron.checkpointing.huggingface.transformers_model import lend, same_values, transformers_logits
from megatron.data import Batch
from megatron.model import build_stage
from megatron.model.specs import HeadSpec
from megatron.model.weight_map import layer_params
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.model_args import DELTA_BLOCKS

# Allowed difference of fp32 logits, absolute or relative to the largest logit if it is above 1.
# Measured for the families: 2e-7 to 2e-6.
BOUND = 2e-5
_DELTA_FACTOR = 10.0
ROWS, LENGTH = 2, 48  # shape of the compared tokens


@dataclass(frozen=True)
class LogitComparison:
    """How far our logits are from those of another program for the same model.

    difference: the largest absolute difference of a logit.
    largest: the other program's largest absolute logit.
    length: number of tokens in each compared sequence.
    not_loaded: why `from_pretrained` was not used; None if it loaded the folder.
    reference: name of the other program.
    relative_bound: the allowed difference, relative to the largest logit if it is above 1.
    """

    difference: float
    largest: float
    length: int
    not_loaded: str | None = None
    reference: str = "transformers"
    relative_bound: float = BOUND

    @classmethod
    def from_logits(cls, logits: Tensor, reference_logits: Tensor, tokens: Tensor, **facts: Any) -> Self:
        """Compares our logits of `tokens` with another program's, `reference_logits`.

        facts: further fields of the result."""
        difference = (logits - reference_logits).abs().max().item()
        return cls(difference, reference_logits.abs().max().item(), tokens.shape[1], **facts)

    @property
    def bound(self) -> float:
        return self.relative_bound * max(1.0, self.largest)

    @property
    def is_close(self) -> bool:
        """Whether the difference is within the bound; false if it is NaN."""
        return self.difference <= self.bound

    def __str__(self) -> str:
        note = (
            ""
            if self.not_loaded is None
            else f"; modules got the weights one by one, without from_pretrained: {self.not_loaded}"
        )
        return (
            f"largest logit difference to {self.reference} {self.difference:.2e} (bound {self.bound:.1e}, largest "
            f"logit {self.largest:.2f}, {ROWS} x {self.length} tokens, fp32){note}"
        )


def some_tokens(args: ModelArgs, vocab_size: int | None = None) -> Tensor:
    """Returns random token ids below `vocab_size` (None: all rows), `[batch, seq]`; the same at each call."""
    length, rows = min(LENGTH, args.max_position_embeddings), vocab_size or args.padded_vocab_size
    assert rows is not None
    return torch.randint(0, rows, (ROWS, length), generator=torch.Generator().manual_seed(0))


def bound_of(args: ModelArgs, bound: float) -> float:
    """Returns the bound for a model's logits: `bound`, or ten times as much for a model with delta rules.

    Their norm of each head divides by what a query reads from the state. That may be small, and then its
    rounding grows."""
    return bound * (_DELTA_FACTOR if {*DELTA_BLOCKS} & {*args.attention_config} else 1.0)


def compare_logits(
    folder: HFFolder, args: NeoXArgs, weights: Callable[[int], Mapping[str, Tensor]], vocab_size: int
) -> LogitComparison:
    """Compare a HuggingFace folder with a NeoX model: logits on random tokens, and all weights.

    The weights in transformers, in the files and in the NeoX model must be equal. Raises CheckpointError if
    logits differ by more than the bound, if a weight differs, or if transformers' logits are NaN or Inf.

    args: the NeoX configuration. weights: takes a NeoX layer index and returns the NeoX model's full tensors
        of this layer. vocab_size: number of vocabulary rows to compare."""
    tokens = some_tokens(args, vocab_size)
    with torch.no_grad():
        reference_logits, not_loaded = transformers_logits(folder, tokens)
        reference_logits = reference_logits[..., :vocab_size]
        logits = neox_logits(args, weights, tokens)[..., :vocab_size]
        if args.score_head:
            logits = logits[:, -1]
    if not reference_logits.isfinite().all():
        broken = [name for name in folder.shapes if not folder.get(name).isfinite().all()]
        broken_names = f"{', '.join(broken[:3])}{f' and {len(broken) - 3} more tensors' if len(broken) > 3 else ''}"
        raise CheckpointError(
            f"{folder.origin}: NaN or Inf in {broken_names or 'the logits, though weights are finite'}: the model "
            "is broken; take an earlier checkpoint"
        )
    comparison = LogitComparison.from_logits(
        logits, reference_logits, tokens, not_loaded=not_loaded, relative_bound=bound_of(args, BOUND)
    )
    if not comparison.is_close:
        raise CheckpointError(
            f"{folder.origin}: is not the same model as the checkpoint, because logits differ: {comparison}"
        )
    # Equal logits do not prove that rows of tokens outside the batch are equal.
    args = plain_args(args)
    layers = ((layer, weights(layer)) for layer, specs in layer_params(args).items() if specs)
    family = FAMILIES[family_of(folder.config)]
    for name, value in to_hf(args, layers, family=family.model_type, vocab_size=vocab_size, copy=False):
        if family.copy_of(name) is not None:  # files may lack it
            continue
        stored = folder.get(name)
        if not same_values(value.to(stored.dtype), stored):
            raise CheckpointError(f"{folder.origin}: is not the same model as the checkpoint: {name} differs")
    return comparison


def plain_args(args: NeoXArgs) -> NeoXArgs:
    """Returns the same model's configuration for one process in fp32 on a CPU, without expert capacity."""
    return args.replace(
        model_parallel_size=1, pipe_parallel_size=1, precision="fp32", fp16=None, bf16=None, sequence_parallel=False,
        compile=False, attention_backend="math", checkpoint_activations=False, expert_parallel_size=1,
        context_parallel_size=1,
        moe_expert_capacity_factor=None,
        train_batch_size=None, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=None,
    )  # fmt: skip


def neox_logits(args: NeoXArgs, weights: Callable[[int], Mapping[str, Tensor]], tokens: Tensor) -> Tensor:
    """Returns a NeoX model's logits, `[batch, seq, padded vocabulary]` fp32, for token ids `[batch, seq]`.

    weights: takes a NeoX layer index and returns the full tensors of this layer, by NeoX names."""
    args = plain_args(args)
    stage = build_stage(args, ParallelGroups.single(torch.device("cpu"))).eval()

    def load(layer: int) -> Callable[[str], Tensor]:
        return weights(layer).__getitem__

    for spec in stage.specs:
        tied, module = isinstance(spec, HeadSpec) and spec.tied, stage.layers[str(spec.index)]
        if any(True for _ in module.parameters()):  # norms may have none
            lend(module, partial(load, 0 if tied else spec.index))
    out = stage(None, Batch(tokens, tokens, torch.ones_like(tokens)))
    return out.transpose(0, 1)
