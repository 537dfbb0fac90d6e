"""A model for inference: this rank's stage, tokenizer and configuration, from a checkpoint or from a run."""

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

    args: the configuration, as `for_inference` returned it.
    dtype: of weights and hidden states.
    columns: number of tokens in the softmax: the vocabulary rows that an export to HuggingFace keeps. None:
        all of padded_vocab_size, as in training.
    lockstep: parameters or experts are sharded over data-parallel ranks (ZeRO 3, expert parallelism), so all
        of these ranks must run the stage equally often.
    source: the folder that the weights came from; empty in training.
    adapter_rows: sets the adapter of each row of a batch (`Request.adapter`); None: rows choose none.
    adapters: (folder, factor) of each set of adapters merged into the weights.
    declared_eos_ids: further ids that end a text, from the model's own files, besides the tokenizer's end of
        document.
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
        """The folder of the weights, then those of the adapters merged into them."""
        return (self.source, *(path for path, _ in self.adapters))

    @property
    def positions(self) -> int:
        """Number of tokens of the longest text that the model can read."""
        unused = self.args.opt_pos_emb_offset if self.args.pos_emb == "learned" else 0
        return self.args.max_position_embeddings - unused


def for_inference(args: NeoXArgs) -> NeoXArgs:
    """Returns the configuration without settings that only help training.

    Off are sequence parallelism (it cannot shard a single token), compiled blocks (each length of text would
    compile again) and expert capacity (a text would depend on others in the batch).
    """
    return args.replace(sequence_parallel=False, compile=False, moe_expert_capacity_factor=None)


@contextmanager
def eager_blocks(stage: Stage) -> Iterator[None]:
    """Runs the blocks of a stage uncompiled within the context; `stage.compiled` is then False.

    Without it, shapes other than those of training steps would be compiled to further graphs.
    """
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
    """Runs a stage that is being trained as `for_inference` would have built it, within the context.

    The stage is in evaluation mode, without sequence parallelism and expert capacity, and its blocks run
    uncompiled. The end of the context restores all of these.
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
