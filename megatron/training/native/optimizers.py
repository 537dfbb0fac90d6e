"""Builds the native engine's optimizers, which clip and skip by the tensors `grad_scale` and `found_inf`."""

from collections.abc import Sequence

import torch

from megatron.model.weight_map import block_specs
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.apex import uses_apex
from megatron.training.native.apex_adam import ApexAdam
from megatron.training.native.fused_update import FusedAdamW
from megatron.training.native.muon import Muon, is_block_matrix
from megatron.training.native.shards import Shard, Weights
from megatron.training.native.stochastic_rounding import Stream, stream_number
from megatron.training.optimizers import Lion, weight_decay_groups


def build_native_optimizer(
    weights: Weights, shards: Sequence[Shard], args: NeoXArgs, parallel: ParallelGroups
) -> torch.optim.Optimizer:
    """Returns AdamW, SGD or Lion over `weight_decay_groups` of these shards of the trained weights, or Muon.

    NeoX's `Adam` decays weights as AdamW does. AdamW is torch's, ours or NVIDIA apex's.
    """
    options = args.optimizer["params"]
    matrices = []
    if args.optimizer_name == "muon":
        blocks = frozenset(spec.index for spec in block_specs(args))
        matrices = [shard for shard in shards if is_block_matrix(shard, blocks)]
        shards = [shard for shard in shards if not is_block_matrix(shard, blocks)]
    groups = weight_decay_groups([(shard.local, shard.spec) for shard in shards], args)
    groups = [group for group in groups if group["params"]]
    if args.optimizer_name == "muon":
        return Muon(weights, matrices, groups, parallel, options, args.weight_decay)
    if args.optimizer_name == "sgd":
        sgd = torch.optim.SGD(groups, lr=args.lr, momentum=options["momentum"], fused=True)
        if options["momentum"] != 0.0:
            for group in groups:
                for param in group["params"]:
                    # torch would make it in the first step, and leave it without values if that is skipped.
                    sgd.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return sgd
    if args.optimizer_name == "lion":
        return Lion(groups, lr=args.lr, betas=options["betas"])
    if uses_apex(args, parallel.device):
        return ApexAdam(groups, lr=args.lr, betas=options["betas"], eps=options["eps"])
    if args.fused_update is True or args.optimizer_state_dtype == "bf16":
        weight_of = {shard.local: shard.param for shard in shards} if args.fused_update is True else {}
        streams = None
        if args.optimizer_state_dtype == "bf16":
            streams = {shard.local: _stream(shard, args.seed, parallel) for shard in shards}
        return FusedAdamW(groups, weight_of, args.lr, options["betas"], options["eps"], streams)
    return torch.optim.AdamW(groups, lr=args.lr, betas=options["betas"], eps=options["eps"], fused=True)


def _stream(shard: Shard, seed: int, parallel: ParallelGroups) -> Stream:
    """Returns the random stream of a shard: the same on all tensor ranks for replicated weights, so that
    these stay equal."""
    part = parallel.rank("tensor") if shard.spec.axis is not None else 0
    return Stream(stream_number(seed, shard.layer, shard.name, part), shard.start)
