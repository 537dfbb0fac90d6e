"""Latent attention: its widths, scale and cache. Tests of families, layouts and documents include it too."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model import block_specs, layer_params
from megatron.model.attention import AttentionOptions, LatentAttention, choose_backends
from megatron.model.attention.backends import Flash, Math
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.cache import CacheRows, LayerCache
from megatron.model.specs import AttentionSpec, LatentAttentionSpec
from megatron.mpu.lora import AdapterRows, AdapterStack
from megatron.neox_arguments import ConfigError
from tests.model.runs import LATENT
from tests.model.stages import make_stage, small

WIDTHS = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}


def latent_spec(**changes: Any) -> LatentAttentionSpec:
    mixer = block_specs(small(**{**LATENT, **changes}))[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


def attention_of(**changes: Any) -> LatentAttention:
    stage = make_stage(small(**{**LATENT, **changes}))
    return stage.layers["2"].attention  # type: ignore[union-attr,return-value]


def test_the_scale_of_logits_counts_both_parts_of_a_head_and_yarn() -> None:
    assert latent_spec(rope_scaling=None).scale == pytest.approx(10**-0.5)
    growth = 0.1 * 0.9 * math.log(2.0) + 1.0
    assert latent_spec().scale == pytest.approx(10**-0.5 * growth**2)
    assert latent_spec(attention_multiplier=0.3).scale == pytest.approx(0.3 * growth**2)


def test_a_cache_holds_latents_and_not_heads() -> None:
    stage = make_stage(small(**LATENT))
    cache = stage.empty_cache(3, 16)
    for layer in cache.layers.values():
        assert isinstance(layer, LayerCache) and layer.values is layer.keys and layer.keys.shape == (3, 16, 1, 12 + 4)
    assert stage.cache_bytes == 4 * (12 + 4) * torch.float32.itemsize
    assert make_stage(small(**{**LATENT, "kv_lora_rank": 4})).cache_bytes == stage.cache_bytes // 2


@torch.no_grad()
@pytest.mark.parametrize("adapters", [None, "lora", "dora", "one of several"])
def test_tokens_after_a_cache_see_what_expanded_latents_show(adapters: str | None) -> None:
    """The absorbed form of the last tokens equals the expanded form of the full text, with adapters too."""
    lora = {"r": 2, "alpha": 4, "dora": adapters == "dora"} if adapters in ("lora", "dora") else None
    attention, seq, num_cached = attention_of(lora=lora), 8, 5
    if adapters == "one of several":
        a, b, gains = (torch.randn(3, *shape, generator=torch.manual_seed(1)) for shape in ((2, 12), (2, 52), (52,)))
        attention.latent_up.stack = AdapterStack(a, b, gains, AdapterRows(torch.tensor([2])))
    x = torch.randn(seq, 1, 32, generator=torch.Generator().manual_seed(0))
    full = attention.core(x, AttentionInputs(), None)
    unadapted = attention_of().core(x, AttentionInputs(), None)
    assert bool((full - unadapted).abs().max() > 0.1) is (adapters is not None)
    pool = torch.zeros(1, 16, 1, 16)
    table = torch.zeros(1, 1, dtype=torch.long)

    def cache(slots: Tensor) -> LayerCache:
        return LayerCache(pool, pool, CacheRows(slots, table, [(0, 1, 1)], {}))

    start = attention.core(x[:num_cached], AttentionInputs(), None, cache(torch.arange(num_cached)))
    torch.testing.assert_close(start, full[:num_cached], rtol=1e-5, atol=1e-6)
    columns = torch.arange(num_cached, seq).unsqueeze(0)
    mask = torch.zeros(1, 1, seq - num_cached, 16)
    mask.masked_fill_(torch.arange(16) > columns.view(1, 1, -1, 1), float("-inf"))
    inputs = AttentionInputs(mask=mask, columns=columns)
    continued = attention.core(x[num_cached:], inputs, None, cache(columns[0]))
    torch.testing.assert_close(continued, full[num_cached:], rtol=1e-5, atol=1e-6)
    assert (pool[0, :seq] != 0).any(-1).all() and not pool[0, seq:].any()


@pytest.mark.parametrize("value_dim", [5, 13])
def test_kernels_of_equal_widths_get_padding(value_dim: int) -> None:
    """Values narrower and wider than keys, with gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(6, 2, 3, 8, generator=generator) for _ in range(2))
    v = torch.randn(6, 2, 3, value_dim, generator=generator)
    results = []
    for backend in (Math("math"), Flash("flash")):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = backend.attend(*leaves, AttentionInputs(), AttentionOptions(scale=0.3))
        out.square().sum().backward()
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    assert results[0][0].shape == (6, 2, 3, value_dim)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    logits = torch.einsum("qbhd,kbhd->bhqk", q, k) * 0.3
    weights = logits.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf")).softmax(-1)
    torch.testing.assert_close(results[0][0], torch.einsum("bhqk,kbhd->qbhd", weights, v), rtol=1e-5, atol=1e-5)


def test_backends_are_tried_with_the_shapes_of_a_cache() -> None:
    """Flash attention on GPUs refuses heads wider than 256: a cache of DeepSeek V3 has 576."""
    spec = replace(latent_spec(), latent=512, rope_dim=64)
    assert spec.cached == replace(spec, kv_heads=1, head_dim=576, v_head_dim=576) and spec.cached.value_dim == 576
    usual = block_specs(small())[0].mixer
    assert isinstance(usual, AttentionSpec) and usual.cached is usual and usual.value_dim == usual.head_dim
    args = small(**LATENT)
    assert choose_backends(args, torch.device("cpu"), [latent_spec()])["auto"].name == "flash"


def test_parameters_of_deepseek_v3s_attention() -> None:
    """187,107,328 weights in each of its layers, by hand from the paper's sizes, and two norms."""
    args = small(
        hidden_size=7168, num_attention_heads=128, num_layers=1, norm="rmsnorm", use_bias_in_attn_linear=False,
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    number = sum(math.prod(p.shape) for p in layer_params(args)[2] if p.name.startswith("attention."))
    queries, latents = 1536 * (7168 + 128 * 192), 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert number == queries + latents + 128 * 128 * 7168 + 1536 + 512 == 187_107_328
    assert args.head_dim == 192 and args.rotary_width == 64


@pytest.mark.parametrize(("changes", "message"), [
    ({"qk_nope_head_dim": None, "v_head_dim": None}, "kv_lora_rank: needs qk_nope_head_dim, v_head_dim"),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim: 3 must be even"),
    ({"head_dim": 12}, "head_dim: is qk_nope_head_dim + qk_rope_head_dim = 10"),
    ({"rotary_pct": 0.5}, "rotary_pct: qk_rope_head_dim says what is rotated"),
    ({"num_kv_heads": 2}, "num_kv_heads: heads share no keys and values"),
    ({"pos_emb": "alibi"}, "kv_lora_rank: needs pos_emb: rotary or none, not alibi"),
    ({"clip_qkv": 2.0}, "clip_qkv: does not work with kv_lora_rank"),
    ({"attention_sinks": True}, "attention_sinks: does not work with kv_lora_rank"),
    ({"attention_output_gate": True}, "attention_output_gate: does not work with kv_lora_rank"),
    ({"use_qk_layernorm": True}, "use_qk_layernorm: does not work with kv_lora_rank"),
    ({"add_qkv_bias": True, "use_bias_in_attn_linear": False}, "add_qkv_bias: does not work with kv_lora_rank"),
    ({"te_mha": True}, "te_mha: does not work with kv_lora_rank"),
    ({"attention_config": [[["mlp"], 4]]}, "kv_lora_rank: no block of attention_config has attention"),
    ({"model_parallel_size": 3}, "model_parallel_size: 3 does not divide num_attention_heads"),
    ({"kv_lora_rank": None}, "qk_nope_head_dim: is read only with kv_lora_rank"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8,
                       "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta: does not work with kv_lora_rank"),
])  # fmt: skip
def test_what_it_does_not_do_is_refused(changes: dict[str, Any], message: str) -> None:
    usual = {"rotary_interleaved": False, "rope_scaling": None, "norm": "rmsnorm", **WIDTHS}
    with pytest.raises(ConfigError, match=re.escape(message)):
        small(num_layers=4, **{**usual, **changes})


def test_hidden_size_need_not_be_a_multiple_of_the_number_of_heads() -> None:
    stage = make_stage(small(**{**LATENT, "hidden_size": 30}))
    assert [spec.head_dim for spec in stage.attention.values()] == [10] * 4
