"""A model in inference mode: this rank's stage with its tokenizer and configuration, of a checkpoint or of a
run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megatron.model.stage import Stage
from megatron.mpu import ParallelGroups
from megatron.mpu.lora import AdapterRows
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """This rank's stage in evaluation mode, and what generation and evaluation need beside it.

    args: the configuration, as `for_inference` made it.
    dtype: of weights and hidden states.
    columns: number of tokens that take part in the softmax: the rows of vocabulary that an export to
    HuggingFace keeps. None: all of padded_vocab_size, as in training.
    lockstep: parameters, or experts, are shared out over data-parallel ranks (ZeRO 3, expert parallelism), so
    that all of them must run the stage equally often.
    source: the folder that the weights came from; empty in training.
    adapter_rows: where rows of a batch choose their adapters (`Request.adapter`); None: there are none.
    adapters: the folders of adapters that its weights have taken in, each with its factor.
    declared_eos_ids: ids that end a text besides the tokenizer's end of document, as the model's own files
    name them.
    """

    args: NeoXArgs
    groups: ParallelGroups
    tokenizer: Tokenizer
    stage: Stage
    dtype: torch.dtype
    columns: int | None = None
    lockstep: bool = False
    source: str = ""
    adapter_rows: AdapterRows | None = None
    declared_eos_ids: tuple[int, ...] = ()
    adapters: tuple[tuple[str, float], ...] = ()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids of all tokens that end a text, in ascending order."""
        return tuple(sorted({self.tokenizer.eod, *self.declared_eos_ids}))

    @property
    def folders(self) -> tuple[str, ...]:
        """All folders that the weights are made of."""
        return (self.source, *(path for path, _ in self.adapters))

    @property
    def positions(self) -> int:
        """Number of tokens of the longest text that the model can read."""
        unused = self.args.opt_pos_emb_offset if self.args.pos_emb == "learned" else 0
        return self.args.max_position_embeddings - unused


def for_inference(args: NeoXArgs) -> NeoXArgs:
    """The same configuration without what only training gains from.

    Sequence parallelism saves activations, but cannot split a single token; compiled blocks would be compiled
    again for every length of text. A limit on how many tokens an expert takes keeps its work even; the text
    would depend on what else is in the batch.
    """
    return args.replace(sequence_parallel=False, compile=False, moe_expert_capacity_factor=None)


@contextmanager
def eager_blocks(stage: Stage) -> Iterator[None]:
    """Within the context the blocks of a stage run uncompiled, and it counts as such: what is run now and
    then, in other shapes than those of steps, would have the run wait for graphs of its own."""
    was_compiled = stage.compiled
    blocks = [stage.layers[str(spec.index)] for spec in stage.blocks] if was_compiled else []
    compiled = [block._compiled_call_impl for block in blocks]
    # torch's stance "force_eager" would reach into kernels that are compiled by themselves (FlexAttention's).
    for block in blocks:
        block._compiled_call_impl = None
    stage.compiled = False
    try:
        yield
    finally:
        stage.compiled = was_compiled
        for block, call in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = call


@contextmanager
def inference_mode(stage: Stage) -> Iterator[None]:
    """Within the context a stage that is being trained runs as `for_inference` would have built it.

    It is in evaluation mode, without sequence parallelism, experts take all tokens, and compiled blocks run
    uncompiled.
    """
    was_training = stage.training
    split_modules = [module for module in stage.modules() if getattr(module, "sequence_parallel", False)]
    limited = [module for module in stage.modules() if getattr(module, "capacity_factor", None) is not None]
    factors = [module.capacity_factor for module in limited]
    stage.eval()
    _set_sequence_parallel(split_modules, False)
    for module in limited:
        module.capacity_factor = None  # type: ignore[assignment]
    try:
        with eager_blocks(stage):
            yield
    finally:
        _set_sequence_parallel(split_modules, True)
        for module, factor in zip(limited, factors, strict=True):
            module.capacity_factor = factor
        stage.train(was_training)


def _set_sequence_parallel(modules: list[nn.Module], on: bool) -> None:
    for module in modules:
        module.sequence_parallel = on  # type: ignore[assignment]
