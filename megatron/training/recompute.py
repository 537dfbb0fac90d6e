"""Recomputes activations in the backward pass, to save memory: in which blocks, and all or only some."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron.model import Stage
from megatron.model.attention import HeadAttention
from megatron.model.block import Block
from megatron.model.moe import RoutingSums
from megatron.model.specs import BlockSpec
from megatron.model.stage import Ran
from megatron.mpu import Linear, PartialSum
from megatron.neox_arguments import NeoXArgs

Run = Callable[[Tensor, int, int], Ran]
# Operators whose results `recompute_granularity: selective` keeps besides attention's, as torchtitan does:
# matrix products, and the maxima from which FP8 scales follow. Batched products are not kept: they are the
# scores of attention without a kernel, which are large and cheap to recompute (arXiv 2205.05198).
_SAVED_OPERATORS = {
    f"aten::{name}"
    for name in ("mm", "addmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "linear", "amax")
}
_SAVED_OPERATORS |= {"megatron::grouped_mm"}
_SAVED_OPERATORS |= {f"_c10d_functional::{name}" for name in ("all_reduce", "reduce_scatter_tensor")}


@dataclass(frozen=True)
class Recomputed:
    """Runs blocks in groups that keep only their inputs and run again in the backward pass.

    It takes the place of `Stage.run_blocks`.
    group_size: number of blocks in a group.
    group_interval: n: every n-th group is recomputed; the others keep all activations.
    on_cpu: the kept inputs are in host memory.
    pinned: that host memory is pinned.
    """

    group_size: int
    group_interval: int
    on_cpu: bool
    pinned: bool

    def __call__(self, run: Run, x: Tensor, first_block: int, last_block: int) -> Ran:
        """Run the blocks `first_block` to `last_block - 1` of the stage on `x`. run: runs a range of
        blocks."""
        routed: tuple[RoutingSums, ...] = ()
        for group, start in enumerate(range(first_block, last_block, self.group_size)):
            end = min(start + self.group_size, last_block)
            if group % self.group_interval:
                x, group_routed = run(x, start, end)
            else:
                with save_on_cpu(pin_memory=self.pinned) if self.on_cpu else nullcontext():
                    # Dropout masks are computed from seeds, so no generator state must be kept.
                    x, group_routed = checkpoint(run, x, start, end, use_reentrant=False, preserve_rng_state=False)
            routed += group_routed
        return x, routed


def recompute_blocks(stage: Stage, args: NeoXArgs) -> None:
    """Make a stage recompute activations, as `checkpoint_activations` and the keys next to it say."""
    if not args.checkpoint_activations:
        return
    for index in recomputed_blocks(stage, args):
        for module in stage.layers[str(index)].modules():
            if isinstance(module, HeadAttention):
                module.keeps_keys = True  # recomputation gathers them
    if args.recompute_granularity == "selective":
        for index in recomputed_blocks(stage, args):
            block = stage.layers[str(index)]
            assert isinstance(block, Block)
            block.checkpoint = selective_checkpoint
            for module in block.modules():
                if isinstance(module, Linear | PartialSum):
                    module.sum_in_place = False
        return
    stage.run_blocks = Recomputed(
        args.checkpoint_num_layers,
        args.recompute_every,
        args.checkpoint_in_cpu,
        pinned=stage.device_of_groups.type == "cuda",
    )


def recomputed_blocks(stage: Stage, args: NeoXArgs) -> list[int]:
    """Returns the layer indices of blocks that are recomputed. Groups of blocks are counted from the first
    block of each of the rank's stages."""
    if args.recompute_granularity == "selective":
        return [spec.index for number, spec in enumerate(stage.blocks) if number % args.recompute_every == 0]
    blocks = [[spec.index for spec in chunk if isinstance(spec, BlockSpec)] for chunk in stage.chunks]
    size, interval = args.checkpoint_num_layers, args.recompute_every
    return [index for chunk in blocks for number, index in enumerate(chunk) if number // size % interval == 0]


def selective_checkpoint(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Returns `function(x)`, keeping for backward only the results of operators that `_is_saved` selects.

    The backward pass recomputes the others. In compiled code the compiler follows the same rule.
    """
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _policy(context: Any, operator: Any, *operands: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_saved(operator: Any) -> bool:
    """Returns whether selective recomputation keeps an operator's result, as of matrix products and
    attention."""
    name = operator.name() if isinstance(operator, torch._ops.OperatorBase) else str(operator)
    name = name.split(".")[0]
    return name in _SAVED_OPERATORS or "attention" in name or "attn" in name


def recomputed_product_share(args: NeoXArgs) -> float:
    """Returns the share of the blocks' matrix products that the backward pass computes again, from 0 to 1.

    Recomputation that the compiler chooses (`activation_memory_budget`) does not count.
    """
    if not args.checkpoint_activations or args.recompute_granularity == "selective":
        return 0.0
    groups = -(-args.num_layers // args.checkpoint_num_layers)
    recomputed = range(0, groups, args.recompute_every)
    last_is_short = groups * args.checkpoint_num_layers - args.num_layers
    blocks = len(recomputed) * args.checkpoint_num_layers - (last_is_short if recomputed[-1] == groups - 1 else 0)
    return blocks / args.num_layers
