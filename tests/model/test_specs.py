"""Blocks may differ; specs of layers declare how, and checkpoints record it."""

import json
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError, check_model, local_layer_state, model_keys
from megatron.checkpointing.families.convert import hf_config
from megatron.checkpointing.parameter_names import to_our_names
from megatron.model import Stage, block_specs, build_stage, init_stage, layer_params
from megatron.model.init import stage_parameters
from megatron.model.mamba import ScanKernels
from megatron.model.weight_map import layer_specs
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from tests.model.runs import GEMMA, LLAMA, MIXED, MODELS
from tests.model.stages import chosen, inputs_of, make_stage, random_batch, random_weights, small


def test_every_block_has_its_own() -> None:
    blocks = block_specs(small(**MIXED))
    assert [block.mixer.kv_heads for block in blocks] == [2, 4, 2, 4]
    assert [block.feed_forward.width for block in blocks] == [48, 48, 32, 48]
    assert [block.mixer.window for block in blocks] == [None, None, 3, 3]
    assert [block.mixer.rotary is None for block in blocks] == [False, True, True, False]
    assert [block.mixer.backend for block in blocks] == ["flash", "flash", "auto", "auto"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_left_out(tied: bool) -> None:
    args = small(**{**LLAMA, "no_weight_tying": not tied})
    assert (args.num_layers + 4 in layer_params(args)) == (not tied)


@pytest.mark.parametrize("name", MODELS)
def test_layers_allocate_what_they_declare(name: str) -> None:
    """In any number of ranks, and without memory where they are built on the meta device."""
    args = small(**MODELS[name])
    declared = {(layer, spec.name): spec for layer, specs in layer_params(args).items() for spec in specs}
    stage = Stage((layer_specs(args),), ParallelGroups.single("meta"), {}, ScanKernels())
    allocated = {(layer, name): param for layer, name, param in stage_parameters(stage, copies=True)}
    assert allocated.keys() == declared.keys()
    assert all(allocated[key].is_meta and allocated[key].shape == declared[key].shape for key in allocated)


def test_caches_are_as_wide_as_their_layers_and_no_family_has_such() -> None:
    stage = build_stage(small(**MIXED), ParallelGroups.single())
    cache = stage.empty_cache(3, 16)
    assert [tuple(layer.keys.shape) for layer in cache.layers.values()] == [(3, 16, heads, 8) for heads in (2, 4, 2, 4)]
    assert stage.cache_bytes == 2 * (2 + 4 + 2 + 4) * 8 * torch.float32.itemsize
    with pytest.raises(CheckpointError, match="intermediate_size"):
        hf_config(small(**{**MIXED, "num_kv_heads": 2}), family="smollm3")


def test_a_list_of_equals_is_the_number() -> None:
    list_args, number_args = (
        small(num_kv_heads=[2], intermediate_size=[48, 48]),
        small(num_kv_heads=2, intermediate_size=48),
    )
    assert layer_specs(list_args) == layer_specs(number_args) and model_keys(list_args) == model_keys(number_args)
    assert layer_specs(NeoXArgs.from_json(small(**MIXED).to_json())) == layer_specs(small(**MIXED))


SLIDING, FULL = "sliding_attention", "full_attention"


def kinds(args: NeoXArgs) -> list[tuple[int | None, float | None]]:
    mixers = [block.mixer for block in block_specs(args)]
    return [(mixer.window, None if mixer.rotary is None else mixer.rotary.base) for mixer in mixers]


def test_a_pattern_repeats_over_the_layers() -> None:
    args = small(**GEMMA)
    assert args.layer_types == (SLIDING, FULL, SLIDING, FULL) and args.no_rope_layers == (1, 1, 0, 1)
    assert kinds(args) == [(3, 100.0), (None, 10000), (3, None), (None, 10000)]
    assert kinds(small(sliding_window_width=3)) == [(3, 10000)] * 2
    assert kinds(small(pos_emb="none")) == [(None, None)] * 2
    # A window as wide as the longest sequence is none, but the layer keeps its base.
    wide = small(**{**GEMMA, "sliding_window_width": 31})
    assert kinds(wide)[0] == (None, 100.0)


def test_every_kind_gets_a_kernel_and_its_own_inputs() -> None:
    args = small(**GEMMA)
    assert chosen(args).backend_by_kind.keys() == {"plain", "with a mask", "from a cache", "over documents"}
    stage, batch = make_stage(args), random_batch(args)
    positions = torch.arange(16).expand_as(batch.tokens)
    local, full, nope, _ = (inputs_of(stage, batch, positions, block) for block in range(4))
    assert local.mask is not None and nope.mask is not None and full.mask is None
    assert local.mask.sum(-1).flatten().tolist() == [min(i, 3) + 1 for i in range(16)]
    assert local.rope is not None and full.rope is not None and nope.rope is None
    for inputs, base in ((local, 100.0), (full, 10000.0)):
        sin = (base ** (-torch.arange(0, 16, 2) / 16)).sin()
        expected = torch.cat([-sin, sin])  # as the rotation wants it
        torch.testing.assert_close(inputs.rope[1][1, 0, 0], expected)


def test_heads_as_wide_as_head_dim_says() -> None:
    args = small(**GEMMA)
    shapes = {spec.name: spec.shape for spec in layer_params(args)[2]}
    assert shapes["attention.query_key_value.weight"] == ((4 + 2 + 2) * 16, 32)
    assert shapes["attention.dense.weight"] == (32, 64) and shapes["attention.q_norm.scale"] == (16,)
    assert small().head_dim == 8 and small().replace(hidden_size=64).head_dim == 16
    assert NeoXArgs.from_json(args.to_json()).head_dim == 16
    assert small(hidden_size=36, num_attention_heads=8, head_dim=4).head_dim == 4  # no multiple


def test_norms_of_one_plus_w_start_at_zero() -> None:
    for keys, count, initial in ((GEMMA, 4 * 6 + 1, 0.0), (LLAMA, 4 * 2 + 1, 1.0)):
        args = small(**keys)
        stage = build_stage(args, ParallelGroups.single())
        init_stage(stage, args, ParallelGroups.single())
        norms = [param for name, param in stage.named_parameters() if name.endswith("scale")]
        assert len(norms) == count and all(param.eq(initial).all() for param in norms)


def test_files_of_wrapped_norms_come_back() -> None:
    args = small(**{**GEMMA, "norm": "te_rmsnorm"})
    weights = random_weights(args)[2]
    state = local_layer_state(2, weights, args, tensor_rank=0, tensor_size=1)
    assert "pre_feedforward_layernorm.norm.weight" in state
    back = to_our_names(2, state, weights.keys(), args, "file")
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "change",
    [{"layer_types": [FULL, SLIDING]}, {"no_rope_layers": [1, 0]}, {"head_dim": 8}, {"rope_local_base_freq": 5.0},
     {"query_pre_attn_scalar": 16}, {"embedding_multiplier": 1.0}, {"zero_centered_gamma": False}],
)  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused(change: dict[str, Any]) -> None:
    saved = json.loads(json.dumps(model_keys(small(**GEMMA))))
    check_model(saved, small(**GEMMA), "here")
    with pytest.raises(CheckpointError, match=next(iter(change))):
        check_model(saved, small(**{**GEMMA, **change}), "here")
