"""A model for inference: this rank's stage, tokenizer and configuration, from a checkpoint or from a run.

`build_filled_stage` makes a stage for inference alone, with weights that a function reads layer by layer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.distributed import run_on_each_rank
from megatron.model.init import materialize, stage_parameters
from megatron.model.stage import Stage, build_stage
from megatron.mpu import DTYPES, ParallelGroups
from megatron.mpu.lora import AdapterRows
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer

LoadLayers = Callable[..., Mapping[int, Mapping[str, Tensor]]]
"""From `layers`, `tensor_rank` and `tensor_size` to weights by layer and name, as `load_weights`."""


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


def build_filled_stage(
    args: NeoXArgs, groups: ParallelGroups, load: LoadLayers, log: Callable[[str], None], *, at_once: bool
) -> Stage:
    """Returns this rank's stage with the weights that `load` returns for a list of layers.

    at_once: read all layers together, so that an error names the problems of all layers; false: one layer
    after another, which needs less memory.
    """
    stage = build_stage(args, groups, log=log)
    materialize(stage, DTYPES[args.params_dtype]).eval()
    layers = sorted({layer for layer, _, _ in stage_parameters(stage)})

    @torch.no_grad()
    def fill() -> None:
        for part in [layers] if at_once else [[layer] for layer in layers]:
            weights = load(layers=part, tensor_rank=groups.rank("tensor"), tensor_size=groups.size("tensor"))
            for layer, name, param in stage_parameters(stage):
                if layer in weights:
                    param.copy_(weights[layer][name])

    run_on_each_rank(groups, fill)
    return stage


@contextmanager
def attributes_set(modules: Iterable[nn.Module], name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of each module within the context; its end restores their values."""
    old_values = [(module, getattr(module, name)) for module in modules]
    for module, _ in old_values:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, old_value in old_values:
            setattr(module, name, old_value)


@contextmanager
def eager_blocks(stage: Stage) -> Iterator[None]:
    """Runs the blocks of a stage uncompiled within the context; `stage.compiled` is then False.

    Without it, shapes other than those of training steps would be compiled to further graphs.
    """
    blocks = [stage.layers[str(spec.index)] for spec in stage.blocks] if stage.compiled else []
    # torch's stance "force_eager" would reach into kernels that are compiled by themselves (FlexAttention's).
    with attributes_set(blocks, "_compiled_call_impl", None), attributes_set([stage], "compiled", False):
        yield


@contextmanager
def inference_mode(stage: Stage) -> Iterator[None]:
    """Runs a stage that is being trained as `for_inference` would have built it, within the context.

    The stage is in evaluation mode, without sequence parallelism and expert capacity, and its blocks run
    uncompiled. The end of the context restores all of these.
    """
    was_training = stage.training
    split_modules = [module for module in stage.modules() if getattr(module, "sequence_parallel", False)]
    limited = [module for module in stage.modules() if getattr(module, "capacity_factor", None) is not None]
    stage.eval()
    try:
        with (
            attributes_set(split_modules, "sequence_parallel", False),
            attributes_set(limited, "capacity_factor", None),
            eager_blocks(stage),
        ):
            yield
    finally:
        stage.train(was_training)
