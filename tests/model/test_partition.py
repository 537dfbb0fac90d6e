"""Layers of pipeline stages against DeepSpeed's own partition."""

import math
from itertools import combinations, pairwise

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from megatron.model import layer_params
from megatron.model.layer_products import forward_products
from megatron.model.pipeline_partition import partition_layers
from megatron.model.weight_map import layer_specs
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.metrics.flops import model_flops
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


def test_flops_are_balanced_over_blocks_that_differ() -> None:
    """A hybrid beside all other divisions: attention over long rows outweighs Mamba, a large head both."""
    args = small(num_layers=8, attention_config=["mamba2", "attention"] * 4, pipe_partition_method="flops",
                 norm="rmsnorm", pos_emb="none", mamba_head_dim=8, mamba_num_groups=2, mamba_state_dim=8,
                 mamba_chunk_size=8,
                 seq_length=512, max_position_embeddings=512, padded_vocab_size=1024, no_weight_tying=True)  # fmt: skip
    params, specs = layer_params(args), layer_specs(args)
    costs = [forward_products(spec, params.get(spec.index, ()), args) for spec in specs]
    assert costs[0] == 0 < costs[1] < costs[2] < costs[-1]
    step = args.replace(train_micro_batch_size_per_gpu=1, train_batch_size=1, gradient_accumulation_steps=1)
    assert model_flops(step) == pytest.approx(6 * step.seq_length * sum(costs))
    cost_of = dict(zip((spec.index for spec in specs), costs, strict=True))
    actual = max(sum(cost_of[spec.index] for spec in part) for part in partition_layers(args, 3))
    every_split = combinations(range(2, len(specs) - 2), 2)  # that leaves each stage a block
    assert actual == min(max(sum(costs[a:b]) for a, b in pairwise([0, *starts, len(specs)])) for starts in every_split)


def test_a_list_of_blocks() -> None:
    args = small(num_layers=4, pipe_parallel_size=4, pipeline_layers=[0, 3, 1, 0])
    assert blocks_of_stages(args, 4) == [[], [2, 3, 4], [5], []]
    assert [len(part) for part in partition_layers(args, 4)] == [1, 3, 1, 2]
    assert len(partition_layers(args, 1)) == 1, "a single stage has all layers"
    with pytest.raises(ConfigError, match="pipeline_layers.* 4 stages, not 2"):
        partition_layers(args, 2)


def test_a_type_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="type:REGEX"):
        partition_layers(small(pipe_partition_method="type:mamba"), 2)
