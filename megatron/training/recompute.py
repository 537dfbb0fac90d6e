"""Recomputation of activations in the backward pass: which blocks give theirs up, and what they keep."""

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
# What recompute_granularity: selective keeps besides attention, as torchtitan does: products, and the largest
# values by which FP8 is scaled. Batched products are none of these: they are the scores of attention without
# a kernel, which are large and cheap (arXiv 2205.05198).
_KEPT = {
    f"aten::{name}"
    for name in ("mm", "addmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "linear", "amax")
}
_KEPT |= {"megatron::grouped_mm"}
_KEPT |= {f"_c10d_functional::{name}" for name in ("all_reduce", "reduce_scatter_tensor")}


@dataclass(frozen=True)
class Recomputed:
    """A way of running blocks for `Stage.run_blocks`: groups of `together` blocks keep their inputs alone and
    are run again in the backward pass.

    every: only every so many-th group. on_cpu: inputs are kept in host memory (pinned on a GPU).
    """

    together: int
    every: int
    on_cpu: bool
    pinned: bool

    def __call__(self, run: Run, x: Tensor, first: int, last: int) -> Ran:
        """Run blocks first..last - 1 of the stage on `x`."""
        routed: tuple[RoutingSums, ...] = ()
        for group, start in enumerate(range(first, last, self.together)):
            end = min(start + self.together, last)
            if group % self.every:
                x, of_group = run(x, start, end)
            else:
                with save_on_cpu(pin_memory=self.pinned) if self.on_cpu else nullcontext():
                    # Masks of dropout are functions of their seeds, so no generator state need be kept.
                    x, of_group = checkpoint(run, x, start, end, use_reentrant=False, preserve_rng_state=False)
            routed += of_group
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
    """`function(x)`, of which the backward pass has the results of `_keeps` and computes the others again. In
    compiled code the compiler reads the same rule."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _policy(context: Any, operator: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(operator: Any) -> bool:
    """Whether the result of an operator is kept: products, and attention by whatever kernel."""
    name = operator.name() if isinstance(operator, torch._ops.OperatorBase) else str(operator)
    name = name.split(".")[0]
    return name in _KEPT or "attention" in name or "attn" in name


def products_run_again(args: NeoXArgs) -> float:
    """The share of the blocks' matrix products that a backward pass computes a second time. What
    `activation_memory_budget` leaves out is the compiler's choice and not in it."""
    if not args.checkpoint_activations or args.recompute_granularity == "selective":
        return 0.0
    groups = -(-args.num_layers // args.checkpoint_num_layers)
    again = range(0, groups, args.recompute_every)
    last_is_short = groups * args.checkpoint_num_layers - args.num_layers
    blocks = len(again) * args.checkpoint_num_layers - (last_is_short if again[-1] == groups - 1 else 0)
    return blocks / args.num_layers
