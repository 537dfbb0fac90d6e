"""Layers of pipeline stages against DeepSpeed's own partition."""

import math
from itertools import pairwise

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from megatron.model import layer_params
from megatron.model.pipeline_partition import partition_layers
from megatron.model.weight_map import layer_specs
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.model.stages import small


def blocks_of_stages(args: NeoXArgs, stages: int) -> list[list[int]]:
    parts = partition_layers(args, stages)
    assert [spec for part in parts for spec in part] == list(layer_specs(args)), "every layer once, in order"
    assert parts[0][0].kind == "embedding" and [spec.kind for spec in parts[-1][-2:]] == ["norm", "head"]
    return [[spec.index for spec in part if spec.kind == "block"] for part in parts]


def from_bounds(bounds: list[int], indices: list[int], num_layers: int) -> list[list[int]]:
    blocks = range(2, num_layers + 2)
    return [[i for i in indices[a:b] if i in blocks] for a, b in pairwise(bounds)]


CASES = [
    (layers, stages)
    for layers in (1, 2, 3, 5, 8, 13, 24, 31)
    for stages in range(1, min(layers, 16) + 1, 1 + layers // 8)
]


def test_blocks_fall_where_deepspeed_puts_them() -> None:
    # NeoX's list: embedding, a function, the blocks, a function, the norm, the head; only blocks weigh.
    for layers, stages in CASES:
        args = small(num_layers=layers, pipe_partition_method="type:transformer|mlp")
        weights = [0, 0, *[1] * layers, 0, 0, 0]
        bounds = partition_balanced(weights=weights, num_parts=stages)
        expected = from_bounds(bounds, list(range(layers + 5)), layers)
        assert blocks_of_stages(args, stages) == expected, (layers, stages)


@pytest.mark.parametrize("method", [
    "uniform", "parameters", "type:transformer|mlp", "type:embedding", "type:norm|linear",
])  # fmt: skip
def test_every_stage_has_a_block(method: str) -> None:
    for number, (layers, stages) in enumerate(CASES):
        # A vocabulary that weighs more than all blocks together.
        heavy = {"padded_vocab_size": 65536, "no_weight_tying": number % 2 == 0}
        args = small(num_layers=layers, pipe_partition_method=method, **heavy)
        assert all(blocks_of_stages(args, stages)), (layers, stages)


@pytest.mark.parametrize("layers, stages", [(8, 2), (8, 4), (12, 4), (12, 3), (24, 8), (30, 7)])
def test_uniform_is_as_even_as_deepspeeds(layers: int, stages: int) -> None:
    args = small(num_layers=layers, pipe_partition_method="uniform")
    sizes = [len(part) for part in partition_layers(args, stages)]
    bounds = partition_uniform(num_items=layers + 3, num_parts=stages)
    assert max(sizes) == max(b - a for a, b in pairwise(bounds))


@pytest.mark.parametrize("vocab", [64, 8192, 32768])
@pytest.mark.parametrize("layers, stages", [(8, 2), (8, 4), (12, 4), (24, 8), (30, 7)])
def test_parameters_are_balanced_as_deepspeed_does(layers: int, stages: int, vocab: int) -> None:
    args = small(num_layers=layers, pipe_partition_method="parameters", padded_vocab_size=vocab, no_weight_tying=True,
                 hidden_size=64)  # fmt: skip
    sizes = {i: sum(math.prod(p.shape) for p in params) for i, params in layer_params(args).items()}
    weights = [sizes[spec.index] for spec in layer_specs(args)]
    bounds = partition_balanced(weights=weights, num_parts=stages)
    deepspeed_max = max(sum(weights[a:b]) for a, b in pairwise(bounds))
    actual_max = max(sum(sizes[spec.index] for spec in part) for part in partition_layers(args, stages))
    if all(from_bounds(bounds, [spec.index for spec in layer_specs(args)], layers)):
        assert actual_max == deepspeed_max
    assert actual_max >= deepspeed_max


def test_a_type_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="type:REGEX"):
        partition_layers(small(pipe_partition_method="type:mamba"), 2)
