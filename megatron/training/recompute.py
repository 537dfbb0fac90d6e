"""Recomputation of activations in the backward pass: which blocks recompute theirs, and what they keep."""

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
from megatron.model.block import Block
from megatron.model.moe import RoutingSums
from megatron.model.stage import Ran
from megatron.mpu import Linear, PartialSum
from megatron.neox_arguments import NeoXArgs

Run = Callable[[Tensor, int, int], Ran]
# recompute_granularity: selective keeps these and attention, as torchtitan does: products, and the largest
# values by which FP8 is scaled. Batched products are not kept: they are the scores of attention without a
# kernel, which are large and cheap (arXiv 2205.05198).
_SAVED_OPERATORS = {
    f"aten::{name}"
    for name in ("mm", "addmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "linear", "amax")
}
_SAVED_OPERATORS |= {"megatron::grouped_mm"}
_SAVED_OPERATORS |= {f"_c10d_functional::{name}" for name in ("all_reduce", "reduce_scatter_tensor")}


@dataclass(frozen=True)
class Recomputed:
    """Runs blocks for `Stage.run_blocks` in groups, which keep only their inputs and run again in the
    backward pass.

    group_size: blocks in a group.
    group_interval: n recomputes every n-th group; the others keep all activations.
    on_cpu: inputs are kept in host memory.
    pinned: that memory is pinned.
    """

    group_size: int
    group_interval: int
    on_cpu: bool
    pinned: bool

    def __call__(self, run: Run, x: Tensor, first_block: int, last_block: int) -> Ran:
        """Run blocks first_block..last_block - 1 of the stage on `x`."""
        routed: tuple[RoutingSums, ...] = ()
        for group, start in enumerate(range(first_block, last_block, self.group_size)):
            end = min(start + self.group_size, last_block)
            if group % self.group_interval:
                x, group_routed = run(x, start, end)
            else:
                with save_on_cpu(pin_memory=self.pinned) if self.on_cpu else nullcontext():
                    # Masks of dropout are functions of their seeds, so no generator state need be kept.
                    x, group_routed = checkpoint(run, x, start, end, use_reentrant=False, preserve_rng_state=False)
            routed += group_routed
        return x, routed


def recompute_blocks(stage: Stage, args: NeoXArgs) -> None:
    """Have a stage recompute activations as the keys say."""
    if not args.checkpoint_activations:
        return
    if args.recompute_granularity == "selective":
        for number, spec in enumerate(stage.blocks):
            if number % args.recompute_every == 0:
                block = stage.layers[str(spec.index)]
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


def selective_checkpoint(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Returns `function(x)`, keeping the results of operators in `_is_saved` only; the backward pass
    recomputes the others.

    In compiled code the compiler applies the same rule.
    """
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _policy(context: Any, operator: Any, *operands: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_saved(operator: Any) -> bool:
    """Returns whether the result of an operator is kept: products, and attention by any kernel."""
    name = operator.name() if isinstance(operator, torch._ops.OperatorBase) else str(operator)
    name = name.split(".")[0]
    return name in _SAVED_OPERATORS or "attention" in name or "attn" in name


def recomputed_product_share(args: NeoXArgs) -> float:
    """Returns the share of the blocks' matrix products that a backward pass computes a second time.

    It does not count recomputation by `activation_memory_budget`, which the compiler chooses.
    """
    if not args.checkpoint_activations or args.recompute_granularity == "selective":
        return 0.0
    groups = -(-args.num_layers // args.checkpoint_num_layers)
    recomputed = range(0, groups, args.recompute_every)
    last_is_short = groups * args.checkpoint_num_layers - args.num_layers
    blocks = len(recomputed) * args.checkpoint_num_layers - (last_is_short if recomputed[-1] == groups - 1 else 0)
    return blocks / args.num_layers
