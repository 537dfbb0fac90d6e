"""Tells which blocks of a model run the same operations, and which pipeline ranks hold the same blocks."""

from dataclasses import replace
from typing import Any

from megatron.model import lowest_trained, trained_parameters
from megatron.model.pipeline_partition import StagePlacement, partition_layers
from megatron.model.weight_map import block_specs
from megatron.neox_arguments import NeoXArgs


def block_kinds(args: NeoXArgs) -> dict[int, int]:
    """Returns for every block the number of its kind. Blocks of a kind run the same operations."""
    size, interval = args.checkpoint_num_layers, args.recompute_every
    if not args.checkpoint_activations:
        size = interval = 1
    fp8_blocks = args.fp8_blocks if args.precision_fp8 not in (None, "off") else range(0)
    trained, lowest = trained_parameters(args), lowest_trained(args)
    keys: list[Any] = []
    kinds = {}
    for i, spec in enumerate(block_specs(args)):
        trained_names = {name for layer, name in trained if layer == spec.index}
        key = replace(spec, index=0), i % (size * interval), i in fp8_blocks, spec.index >= lowest, trained_names
        keys += [] if key in keys else [key]
        kinds[spec.index] = keys.index(key)
    return kinds


def traced_places(args: NeoXArgs) -> list[int]:
    """Returns the pipeline ranks to record: the first, the last, and of those between one for each
    combination of kinds of blocks."""
    keys = _place_keys(args)
    return [rank for rank, key in enumerate(keys) if keys.index(key) == rank]


def stand_in_places(args: NeoXArgs) -> list[int]:
    """Returns for every pipeline rank the number of the one in `traced_places` that stands for it."""
    keys = _place_keys(args)
    different = list(dict.fromkeys(keys))
    return [different.index(key) for key in keys]


def _place_keys(args: NeoXArgs) -> list[object]:
    """Returns a key for each pipeline rank, equal for ranks whose stages have equal kinds of blocks."""
    placement, kinds = StagePlacement.configured(args, args.pp), block_kinds(args)
    stages = partition_layers(args, placement.stages)
    stage_kinds = [frozenset(kinds[spec.index] for spec in stage if spec.index in kinds) for stage in stages]
    ends = (0, placement.ranks - 1)
    return [
        rank if rank in ends else tuple(stage_kinds[stage] for stage in placement.stages_of(rank))
        for rank in range(placement.ranks)
    ]
