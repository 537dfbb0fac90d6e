"""Logits equal those of transformers' models of the same weights."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from megatron.data import Batch
from megatron.neox_arguments import NeoXArgs
from tests.model.stages import Weights, small, stage_with

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def randomised(model: Any) -> dict[str, Tensor]:
    """Give every weight, biases and norms included, a random value; returns them by name."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = 0.2 * torch.randn(param.shape, generator=generator)
            is_norm = param.dim() == 1 and name.endswith("weight")
            param.copy_(1 + value if is_norm else value)
    return model.eval().state_dict()


@torch.no_grad()
def assert_equal_logits(model: Any, args: NeoXArgs, weights: Weights) -> None:
    logits = stage_with(args, weights)(None, Batch(TOKENS, TOKENS, torch.ones_like(TOKENS)))
    assert isinstance(logits, Tensor)
    expected = model(TOKENS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.transpose(0, 1), expected, rtol=1e-5, atol=1e-5)


def interleaved(parts: list[Tensor], heads: int) -> Tensor:
    """[q; k; v] in blocks to NeoX's [q|k|v] per head."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)


def both(state: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    tensors = {
        f"{ours}.{kind}": state[f"{theirs}.{kind}"] for kind in ("weight", "bias") if f"{theirs}.{kind}" in state
    }
    assert tensors
    return tensors


@pytest.mark.parametrize(
    "rotary_pct, parallel, tied, bias", list(product([0.25, 0.5, 1.0], [True, False], [True, False], [True, False]))
)
def test_gpt_neox(rotary_pct: float, parallel: bool, tied: bool, bias: bool) -> None:
    config = GPTNeoXConfig(
        **SIZES, intermediate_size=48, use_parallel_residual=parallel, tie_word_embeddings=tied, attention_bias=bias,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": rotary_pct},
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    state = randomised(model)
    weights: Weights = {0: {"word_embeddings.weight": state["gpt_neox.embed_in.weight"]}}
    for i in range(2):
        at = f"gpt_neox.layers.{i}."
        weights[i + 2] = {
            **both(state, at + "input_layernorm", "input_layernorm"),
            **both(state, at + "post_attention_layernorm", "post_attention_layernorm"),
            **both(state, at + "attention.query_key_value", "attention.query_key_value"),
            **both(state, at + "attention.dense", "attention.dense"),
            **both(state, at + "mlp.dense_h_to_4h", "mlp.linear1"),
            **both(state, at + "mlp.dense_4h_to_h", "mlp.linear2"),
        }
    weights[5] = both(state, "gpt_neox.final_layer_norm", "norm")
    weights[6] = {"final_linear.weight": model.get_output_embeddings().weight.detach()}
    args = small(
        rotary_pct=rotary_pct, rotary_emb_base=500, gpt_j_residual=parallel, no_weight_tying=not tied,
        use_bias_in_attn_linear=bias, intermediate_size=48,
    )  # fmt: skip
    assert_equal_logits(model, args, weights)


def llama_weights(state: dict[str, Tensor], kv_heads: int, heads: int = 4) -> Weights:
    weights: Weights = {0: {"word_embeddings.weight": state["model.embed_tokens.weight"]}}
    for i in range(2):
        at, block = f"model.layers.{i}.", {}
        for kind in ("weight", "bias"):
            if f"{at}self_attn.q_proj.{kind}" in state:
                parts = [state[f"{at}self_attn.{k}_proj.{kind}"] for k in "qkv"]
                whole = interleaved(parts, heads) if kv_heads == heads else torch.cat(parts)
                block[f"attention.query_key_value.{kind}"] = whole
            if f"{at}mlp.up_proj.{kind}" in state:
                block[f"mlp.linear1.{kind}"] = torch.cat([state[f"{at}mlp.{k}_proj.{kind}"] for k in ("up", "gate")])
        block |= both(state, at + "self_attn.o_proj", "attention.dense")
        block |= both(state, at + "mlp.down_proj", "mlp.linear2")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            block |= both(state, at + norm, norm)
        weights[i + 2] = block
    weights[5] = both(state, "model.norm", "norm")
    weights[6] = {"final_linear.weight": state["lm_head.weight"]}
    return weights


@pytest.mark.parametrize(
    "kv_heads, tied, attention_bias, mlp_bias",
    [(4, False, False, False), (2, False, False, False), (1, False, False, False), (2, True, True, False),
     (4, True, False, True), (1, True, True, True), (2, False, True, True)],
)  # fmt: skip
def test_llama(kv_heads: int, tied: bool, attention_bias: bool, mlp_bias: bool) -> None:
    _llama("silu", "swiglu", kv_heads, tied, attention_bias, mlp_bias)


GATES = {"gelu": "geglu", "relu": "reglu", "linear": "bilinear", "sigmoid": "glu"}


@pytest.mark.parametrize("theirs, ours", GATES.items())
def test_llama_with_other_gates(theirs: str, ours: str) -> None:
    _llama(theirs, ours, 2, False, False, True)


def _llama(theirs: str, ours: str, kv_heads: int, tied: bool, attention_bias: bool, mlp_bias: bool) -> None:
    config = LlamaConfig(
        **SIZES, intermediate_size=40, num_key_value_heads=kv_heads, tie_word_embeddings=tied, hidden_act=theirs,
        attention_bias=attention_bias, mlp_bias=mlp_bias, rms_norm_eps=1e-3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = llama_weights(randomised(model), kv_heads)
    for tensors in weights.values():
        for name in [name for name in tensors if "norm" in name]:
            tensors[name.replace(".weight", ".scale")] = tensors.pop(name)
    args = small(
        norm="rmsnorm", rms_norm_epsilon=1e-3, activation=ours, intermediate_size=40, num_kv_heads=kv_heads,
        no_weight_tying=not tied, use_bias_in_attn_linear=attention_bias, use_bias_in_mlp=mlp_bias,
    )  # fmt: skip
    assert_equal_logits(model, args, weights)


@pytest.mark.parametrize("kv_heads, rotary_pct", [(2, 0.25), (1, 0.5), (4, 0.25)])
def test_stablelm_layernorm_partial_rotary_and_grouped_heads(kv_heads: int, rotary_pct: float) -> None:
    config = StableLmConfig(
        **SIZES, intermediate_size=40, num_key_value_heads=kv_heads, use_qkv_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary_pct},
    )  # fmt: skip
    model = StableLmForCausalLM(config)
    weights = llama_weights(randomised(model), kv_heads)
    for i in range(2):
        weights[i + 2]["attention.dense.bias"] = torch.zeros(32)
    args = small(
        activation="swiglu", intermediate_size=40, num_kv_heads=kv_heads, no_weight_tying=True, rotary_pct=rotary_pct,
        use_bias_in_mlp=False,
    )  # fmt: skip
    assert_equal_logits(model, args, weights)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_learned_positions_and_tanh_gelu(tied: bool) -> None:
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=48, tie_word_embeddings=tied
    )
    model = GPT2LMHeadModel(config)
    state = randomised(model)
    weights: Weights = {
        0: {
            "word_embeddings.weight": state["transformer.wte.weight"],
            "position_embeddings.weight": state["transformer.wpe.weight"],
        }
    }
    for i in range(2):
        at = f"transformer.h.{i}."
        qkv = [state[f"{at}attn.c_attn.{kind}"].t().chunk(3) for kind in ("weight", "bias")]
        block = {
            "attention.query_key_value.weight": interleaved(list(qkv[0]), 4),
            "attention.query_key_value.bias": interleaved(list(qkv[1]), 4),
            **both(state, at + "ln_1", "input_layernorm"),
            **both(state, at + "ln_2", "post_attention_layernorm"),
        }
        linears = {"attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.linear1", "mlp.c_proj": "mlp.linear2"}
        for theirs, ours in linears.items():
            block[f"{ours}.weight"] = state[f"{at}{theirs}.weight"].t()
            block[f"{ours}.bias"] = state[f"{at}{theirs}.bias"]
        weights[i + 2] = block
    weights[5] = both(state, "transformer.ln_f", "norm")
    weights[6] = {"final_linear.weight": state["lm_head.weight"]}
    args = small(pos_emb="learned", bias_gelu_fusion=True, no_weight_tying=not tied, intermediate_size=48)
    assert_equal_logits(model, args, weights)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom_alibi(heads: int) -> None:
    hidden = 8 * heads
    config = BloomConfig(vocab_size=64, hidden_size=hidden, n_layer=2, n_head=heads)
    model: Any = BloomForCausalLM(config)
    model.transformer.word_embeddings_layernorm = nn.Identity()  # BLOOM's own addition
    state = randomised(model)
    weights: Weights = {0: {"word_embeddings.weight": state["transformer.word_embeddings.weight"]}}
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attention.query_key_value": "attention.query_key_value",
        "self_attention.dense": "attention.dense",
        "mlp.dense_h_to_4h": "mlp.linear1",
        "mlp.dense_4h_to_h": "mlp.linear2",
    }
    for i in range(2):
        weights[i + 2] = {}
        for theirs, ours in names.items():
            weights[i + 2] |= both(state, f"transformer.h.{i}.{theirs}", ours)
    weights[5] = both(state, "transformer.ln_f", "norm")
    args = small(hidden_size=hidden, num_attention_heads=heads, pos_emb="alibi", bias_gelu_fusion=True)
    assert_equal_logits(model, args, weights)
