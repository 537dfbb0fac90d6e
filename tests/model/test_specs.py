"""The specs of layers that differ, what they declare, and what is refused."""

from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError, model_keys
from megatron.checkpointing.families import hf_config
from megatron.model import Stage, block_specs, build_stage, layer_params, layer_specs
from megatron.model.init import stage_parameters
from megatron.model.mamba import ScanKernels
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.model.runs import MIXED, MODELS
from tests.model.stages import small


def test_every_block_has_its_own() -> None:
    blocks = block_specs(small(**MIXED))
    assert [block.mixer.kv_heads for block in blocks] == [2, 4, 2, 4]
    assert [block.feed_forward.width for block in blocks] == [48, 48, 32, 48]
    assert [block.mixer.window for block in blocks] == [None, None, 3, 3]
    assert [block.mixer.rotary is None for block in blocks] == [False, True, True, False]
    assert [block.mixer.backend for block in blocks] == ["flash", "flash", "auto", "auto"]


@pytest.mark.parametrize("name", MODELS)
def test_layers_allocate_what_they_declare(name: str) -> None:
    """In any number of ranks, and without memory where they are built on the meta device."""
    args = small(**MODELS[name])
    declared = {(layer, spec.name): spec for layer, specs in layer_params(args).items() for spec in specs}
    stage = Stage(layer_specs(args), ParallelGroups.single("meta"), {}, ScanKernels())
    made = {(layer, name): param for layer, name, param in stage_parameters(stage, copies=True)}
    assert made.keys() == declared.keys()
    assert all(made[key].is_meta and made[key].shape == declared[key].shape for key in made)


def test_caches_are_as_wide_as_their_layers() -> None:
    stage = build_stage(small(**MIXED), ParallelGroups.single())
    cache = stage.empty_cache(3, 16)
    assert [tuple(layer.keys.shape) for layer in cache.layers.values()] == [(3, 16, heads, 8) for heads in (2, 4, 2, 4)]
    assert stage.cache_bytes == 2 * (2 + 4 + 2 + 4) * 8 * torch.float32.itemsize


def test_a_list_of_equals_is_the_number() -> None:
    one, other = small(num_kv_heads=[2], intermediate_size=[48, 48]), small(num_kv_heads=2, intermediate_size=48)
    assert layer_specs(one) == layer_specs(other) and model_keys(one) == model_keys(other)
    assert layer_specs(NeoXArgs.from_json(small(**MIXED).to_json())) == layer_specs(small(**MIXED))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_heads": [2, 4, 2]}, "num_kv_heads: has 3 layers, but num_layers is 2"),
    ({"num_kv_heads": [2, 3]}, "num_kv_heads: 3 does not divide num_attention_heads 4"),
    ({"num_kv_heads": [4, 0]}, "num_kv_heads: expected a number at least 1"),
    ({"num_kv_heads": [4, 1], "model_parallel_size": 2}, "model_parallel_size: 2 is more than num_kv_heads"),
    ({"intermediate_size": [48, 49], "model_parallel_size": 2}, "intermediate_size: the MLP's width 49 is not"),
    ({"intermediate_size": [48, "wide"]}, "intermediate_size: expected int or a list of int"),
]


@pytest.mark.parametrize("changes, told", REFUSED)
def test_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as problem:
        small(**changes)
    assert told in str(problem.value)


def test_no_family_has_layers_of_other_widths() -> None:
    with pytest.raises(CheckpointError, match="layers differ in intermediate_size here"):
        hf_config(small(**{**MIXED, "num_kv_heads": 2}), family="smollm3")
