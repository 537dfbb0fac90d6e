"""A model for inference: this rank's stage, tokenizer and configuration, from a checkpoint or from a run.

`build_filled_stage` builds a stage for inference only, and fills it with weights that are read layer by
layer.
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
"""A function of `layers`, `tensor_rank` and `tensor_size` that returns this rank's weights, by NeoX layer
index and name, like `load_weights`."""


@dataclass(frozen=True)
class Model:
    """This rank's stage in evaluation mode, and what else generation and evaluation need.

    args: the configuration, as `for_inference` returned it.
    dtype: of weights and hidden states.
    columns: number of tokens in the softmax: the vocabulary rows that an export to HuggingFace keeps. None:
        all of padded_vocab_size, as in training.
    lockstep: parameters or experts are sharded over data-parallel ranks (ZeRO 3, expert parallelism), so all
        of these ranks must run the stage equally often.
    source: the folder that the weights came from; empty in training.
    adapter_rows: set it to choose the adapter of each row of a batch (`Request.adapter`); None: adapters are
        not chosen per row.
    adapters: (folder, factor) of each set of adapters merged into the weights.
    declared_eos_ids: ids that end a text according to the model's own files, in addition to the tokenizer's
        end of document.
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
        """The folder of the weights, then the folders of the adapters merged into them."""
        return (self.source, *(path for path, _ in self.adapters))

    @property
    def positions(self) -> int:
        """The number of tokens of the longest text that the model can read."""
        unused = self.args.opt_pos_emb_offset if self.args.pos_emb == "learned" else 0
        return self.args.max_position_embeddings - unused


def for_inference(args: NeoXArgs) -> NeoXArgs:
    """Returns the configuration without the settings that only help training.

    It turns off sequence parallelism (a single token cannot be sharded), compiled blocks (each text length
    would compile again), expert capacity (a text's output would depend on other texts in the batch) and
    blocks of multi-token prediction, which only training runs.
    """
    unused = {"mtp_num_layers": None, "mtp_loss_scaling_factor": 0.1}
    return args.replace(sequence_parallel=False, compile=False, moe_expert_capacity_factor=None, **unused)


def build_filled_stage(
    args: NeoXArgs, groups: ParallelGroups, load: LoadLayers, log: Callable[[str], None], *, at_once: bool
) -> Stage:
    """Builds this rank's stage and fills it with the weights that `load` returns for a list of layers.

    at_once: True: all layers are read together, so that an error names the problems of all layers. False: one
        layer after another, which needs less memory.
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
    """Sets the attribute `name` of each module to `value` within the context; restores the old values at its
    end."""
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

    Otherwise every shape that training steps do not have would compile another graph.
    """
    blocks = [stage.layers[str(spec.index)] for spec in stage.blocks] if stage.compiled else []
    # torch's "force_eager" would also turn off the compilation of single kernels, such as FlexAttention's.
    with attributes_set(blocks, "_compiled_call_impl", None), attributes_set([stage], "compiled", False):
        yield


@contextmanager
def inference_mode(stage: Stage) -> Iterator[None]:
    """Within the context, runs a stage that is being trained as if `for_inference` had configured it.

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
