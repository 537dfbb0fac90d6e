"""What may differ from block to block: windows, rotary positions and their base; and the keys that say it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError, check_model, local_layer_state, model_keys
from megatron.checkpointing.parameter_names import to_our_names
from megatron.model import block_specs, build_stage, init_stage, layer_params
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs, load
from tests.model.runs import GEMMA, LLAMA
from tests.model.stages import chosen, inputs_of, random_batch, random_weights, small, stage_with

CPU = torch.device("cpu")
SLIDING, FULL = "sliding_attention", "full_attention"


def kinds(args: NeoXArgs) -> list[tuple[int | None, float | None]]:
    """Window and rotary base of every block."""
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


def test_both_kinds_of_calls_get_a_kernel() -> None:
    assert chosen(small(**GEMMA)).by_kind.keys() == {"plain", "with a mask", "from a cache", "over documents"}


def test_every_kind_gets_its_own_inputs() -> None:
    args = small(**GEMMA)
    stage, batch = stage_with(args, random_weights(args)), random_batch(args)
    positions = torch.arange(16).expand_as(batch.tokens)
    near, far, still, _ = (inputs_of(stage, batch, positions, block) for block in range(4))
    assert near.mask is not None and still.mask is not None and far.mask is None
    assert near.mask.sum(-1).flatten().tolist() == [min(i, 3) + 1 for i in range(16)]
    assert near.rope is not None and far.rope is not None and still.rope is None
    for inputs, base in ((near, 100.0), (far, 10000.0)):
        assert inputs.rope is not None
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
    args = small(**GEMMA)
    stage = build_stage(args, ParallelGroups.single())
    init_stage(stage, args, ParallelGroups.single())
    norms = {name: param for name, param in stage.named_parameters() if name.endswith("scale")}
    assert len(norms) == 4 * 6 + 1 and not any(param.any() for param in norms.values())
    assert all(param.eq(1).all() for name, param in plain_stage().named_parameters() if name.endswith("scale"))


def plain_stage() -> torch.nn.Module:
    args = small(**LLAMA)
    stage = build_stage(args, ParallelGroups.single())
    init_stage(stage, args, ParallelGroups.single())
    return stage


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


ROTARY = {"pos_emb": "rotary"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": [SLIDING]}, "layer_types: sliding_attention needs sliding_window_width"),
    ({"layer_types": [FULL], "sliding_window_width": 4}, "sliding_window_width: no layer of layer_types"),
    ({"layer_types": [FULL] * 3}, "layer_types: has 3 layers, but num_layers is 2"),
    ({"layer_types": ["local"]}, "layer_types: expected a list of full_attention or sliding_attention"),
    ({"no_rope_layers": [1, 2]}, "no_rope_layers: needs pos_emb: rotary and is a list of 0 and 1"),
    ({"no_rope_layers": [1], "pos_emb": "alibi"}, "no_rope_layers: needs pos_emb: rotary"),
    ({"rope_local_base_freq": 100}, "rope_local_base_freq: needs pos_emb: rotary and sliding_attention"),
    ({"zero_centered_gamma": True}, "zero_centered_gamma: needs norm: rmsnorm, not layernorm"),
    ({"qk_norm_per_head": True}, "qk_norm_per_head: needs use_separate_qk_norms: true"),
    ({"head_dim": 7}, "pos_emb: 7 of 7 dimensions a head would be rotated"),
    ({"norm_placement": "sandwich", "gpt_j_residual": True}, "norm_placement: sandwich has no form with"),
    ({"kv_channels": 4}, "kv_channels: unknown key; it is head_dim here"),
]


@pytest.mark.parametrize("keys, message", REFUSED)
def test_contradictions_are_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    small_file = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "max_position_embeddings": 32,
        **ROTARY, **keys,
    }  # fmt: skip
    file = tmp_path / "a.yml"
    file.write_text(json.dumps(small_file, indent=1))
    with pytest.raises(ConfigError) as caught:
        load([file])
    assert f": {message}" in str(caught.value)
