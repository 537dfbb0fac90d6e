"""Assigns layers to pipeline stages (`pipe_partition_method`, `pipeline_layers`), and stages to ranks."""

import math
import re
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron.model.layer_products import forward_products
from megatron.model.specs import LayerSpec
from megatron.model.weight_map import layer_params, layer_specs
from megatron.neox_arguments import ModelArgs

# NeoX's class names of these layers, in lower case, which `pipe_partition_method: type:REGEX` matches.
_NEOX_CLASSES = {
    "embedding": "embeddingpipe",
    "block": "paralleltransformerlayerpipe",
    "prediction": "paralleltransformerlayerpipe",  # of multi-token prediction, which NeoX lacks
    "norm": "normpipe",
    "head": "parallellinearpipe",
    "score": "parallellinearpipe",
}


class StagePlacement(NamedTuple):
    """Assigns the stages of the model to pipeline ranks.

    ranks: number of pipeline ranks. chunks: stages of each rank (virtual stages). The stages go round the
    ranks `chunks` times, or, if `is_v`, from the first rank to the last and back.
    """

    ranks: int
    chunks: int
    is_v: bool = False

    @staticmethod
    def configured(args: ModelArgs, ranks: int) -> "StagePlacement":
        """Returns the placement for a configuration on `ranks` pipeline ranks."""
        return StagePlacement(ranks, args.stages_per_rank, args.is_v_pipeline) if ranks > 1 else StagePlacement(1, 1)

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Returns the pipeline rank that holds a stage."""
        place = stage % self.ranks
        return self.ranks - 1 - place if self.is_v and stage >= self.ranks else place

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of a pipeline rank, in the order of the model. The index of a stage in this list
        is its chunk in `Stage.chunks`."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]


def _layer_weights(args: ModelArgs, specs: tuple[LayerSpec, ...]) -> list[float]:
    """Returns the weight of each layer. `partition_layers` balances their sums over the stages.

    By `pipe_partition_method`, a weight is 1, the layer's number of parameters, the multiplications that a
    token takes in it, or 1 for layers whose class matches a pattern, else 0.
    """
    method = args.pipe_partition_method.lower()
    if method == "uniform":
        return [1] * len(specs)
    if method == "parameters":
        sizes = {i: sum(math.prod(p.shape) for p in params) for i, params in layer_params(args).items()}
        return [sizes.get(spec.index, 0) for spec in specs]
    if method == "flops":
        params = layer_params(args)
        return [forward_products(spec, params.get(spec.index, ()), args) for spec in specs]
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"))
        weights = [float(bool(pattern.search(_NEOX_CLASSES[spec.kind]))) for spec in specs]
        if any(weights):
            return weights
    expected = "expected uniform, parameters, flops, or type:REGEX that matches a layer's class (type:transformer|mlp)"
    raise args.error(
        "pipe_partition_method", f"{args.pipe_partition_method} is not supported or matches no layer: {expected}"
    )


def partition_layers(args: ModelArgs, stages: int) -> list[tuple[LayerSpec, ...]]:
    """Splits the list of layers into `stages` contiguous parts, one for each pipeline stage.

    `pipeline_layers` gives the number of blocks of each of several stages. Without it, the largest total
    weight of a stage is minimised, then the smallest is maximised. Ties give earlier stages more, so equal
    blocks are split as by DeepSpeed's `partition_balanced`. Every stage gets a block then.

    Raises ConfigError if `pipeline_layers` is for another number of stages.
    """
    specs = layer_specs(args)
    if args.pipeline_layers is not None and stages > 1:
        if len(args.pipeline_layers) != stages:
            key, value = "pipeline_layers", list(args.pipeline_layers)
            raise args.error(key, f"{value} are {len(value)} stages, not {stages}; change one")
        ends = list(accumulate(args.pipeline_layers, initial=1))  # the embedding comes first
        return [specs[start:stop] for start, stop in pairwise([0, *ends[1:-1], len(specs)])]
    weight = [0, *accumulate(_layer_weights(args, specs))]
    blocks = [0, *accumulate(spec.kind == "block" for spec in specs)]
    # The best split of the first n layers, by n: (largest, -smallest weight of a stage, bounds of the
    # stages).
    cuts: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0, -math.inf, (0,))}
    for stages_left in reversed(range(stages)):
        # The stages after this one need a block each, and the last stage takes all that is left.
        stops = [stop for stop in range(1, len(specs) + 1) if blocks[-1] - blocks[stop] >= stages_left]
        stops = stops if stages_left else stops[-1:]
        ways = [
            (
                max(largest, weight[stop] - weight[start]),
                max(smallest, weight[start] - weight[stop]),
                (*bounds, stop),
            )
            for start, (largest, smallest, bounds) in cuts.items()
            for stop in stops
            if blocks[stop] > blocks[start]
        ]
        cuts = {}
        for way in sorted(ways, key=lambda way: (way[0], way[1], -way[2][-2])):
            cuts.setdefault(way[2][-1], way)
    bounds = cuts[len(specs)][2]
    return [specs[start:stop] for start, stop in pairwise(bounds)]
