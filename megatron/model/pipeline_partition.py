"""Assigns layers to pipeline stages (`pipe_partition_method`)."""

import math
import re
from itertools import accumulate, pairwise

from megatron.model.specs import LayerSpec
from megatron.model.weight_map import layer_params, layer_specs
from megatron.neox_arguments import ModelArgs

# What NeoX calls these layers, for `pipe_partition_method: type:REGEX`.
_NEOX_CLASSES = {
    "embedding": "embeddingpipe",
    "block": "paralleltransformerlayerpipe",
    "norm": "normpipe",
    "head": "parallellinearpipe",
    "score": "parallellinearpipe",
}


def _layer_weights(args: ModelArgs, specs: tuple[LayerSpec, ...]) -> list[int]:
    """Returns the weight of each layer, which `pipe_partition_method` balances over the stages.

    It is 1, the number of parameters, or whether the layer's class matches a pattern.
    """
    method = args.pipe_partition_method.lower()
    if method == "uniform":
        return [1] * len(specs)
    if method == "parameters":
        sizes = {i: sum(math.prod(p.shape) for p in params) for i, params in layer_params(args).items()}
        return [sizes.get(spec.index, 0) for spec in specs]
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"))
        weights = [int(bool(pattern.search(_NEOX_CLASSES[spec.kind]))) for spec in specs]
        if any(weights):
            return weights
    expected = "expected uniform, parameters, or type:REGEX with a REGEX that matches layers, as type:transformer|mlp"
    raise args.error("pipe_partition_method", f"{args.pipe_partition_method}: {expected}")


def partition_layers(args: ModelArgs, stages: int) -> list[tuple[LayerSpec, ...]]:
    """Split the list of layers into `stages` contiguous parts, one for each pipeline stage.

    It minimises the largest weight of a stage, then maximises the smallest. Ties give earlier stages more, so
    equal blocks are split as by DeepSpeed's `partition_balanced`. Every stage gets a block, because all
    stages must have the same parameter groups.
    """
    specs = layer_specs(args)
    weight = [0, *accumulate(_layer_weights(args, specs))]
    blocks = [0, *accumulate(spec.kind == "block" for spec in specs)]
    # By number of layers cut so far: (largest, -smallest weight of a stage, bounds of the stages).
    cuts: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0, -math.inf, (0,))}
    for _ in range(stages):
        ways = [
            (
                max(largest, weight[stop] - weight[start]),
                max(smallest, weight[start] - weight[stop]),
                (*bounds, stop),
            )
            for start, (largest, smallest, bounds) in cuts.items()
            for stop in range(start + 1, len(specs) + 1)
            if blocks[stop] > blocks[start]
        ]
        cuts = {}
        for way in sorted(ways, key=lambda way: (way[0], way[1], -way[2][-2])):
            cuts.setdefault(way[2][-1], way)
    bounds = cuts[len(specs)][2]
    return [specs[start:stop] for start, stop in pairwise(bounds)]
