"""A model that only reads: this rank's stage and all that goes with it, from a checkpoint or in the middle of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megatron.model.stage import Stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """A stage in evaluation mode. args: of `for_inference`; dtype: of weights and hidden states.

    columns: tokens that share out probability: the rows that an export to HuggingFace keeps. None: all of
    padded_vocab_size, as in training. lockstep: parameters are shared out over data-parallel ranks (ZeRO 3), so that
    these must run the stage equally often. source: the folder that the weights came from; empty in training.
    declared_eos_ids: ids that end a text besides the tokenizer's end of document, as the model's own files name them.
    """

    args: NeoXArgs
    groups: ParallelGroups
    tokenizer: Tokenizer
    stage: Stage
    dtype: torch.dtype
    columns: int | None = None
    lockstep: bool = False
    source: str = ""
    declared_eos_ids: tuple[int, ...] = ()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return tuple(sorted({self.tokenizer.eod, *self.declared_eos_ids}))

    @property
    def positions(self) -> int:
        """Tokens of the longest text that it can read."""
        unused = self.args.opt_pos_emb_offset if self.args.pos_emb == "learned" else 0
        return self.args.max_position_embeddings - unused


def for_inference(args: NeoXArgs) -> NeoXArgs:
    """Without what only training gains from: sequence parallelism saves activations, and cannot cut a single token;
    compiled blocks would be compiled again for texts of every length."""
    return args.replace(sequence_parallel=False, compile=False)


@contextmanager
def inference_mode(stage: Stage) -> Iterator[None]:
    """A stage that is being trained, as `for_inference` would have built it, until the end of the context: compiled
    blocks run as they are written."""
    was_training = stage.training
    cut = [module for module in stage.modules() if getattr(module, "sequence_parallel", False)]
    stage.eval()
    _set(cut, False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _set(cut, True)
        stage.train(was_training)


def _set(modules: list[nn.Module], on: bool) -> None:
    for module in modules:
        module.sequence_parallel = on  # type: ignore[assignment]
