"""What a block adds to what, against transformers' models of the same weights."""

from itertools import product

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from megatron.model.weight_map import layer_params
from tests.model.stages import Weights, small
from tests.model.test_transformers import SIZES, assert_equal_logits, both, interleaved, llama_weights, randomised


@pytest.mark.parametrize("kv_heads, tied", product([4, 2, 1], [False, True]))
def test_olmo3(kv_heads: int, tied: bool) -> None:
    config = Olmo3Config(
        **SIZES, intermediate_size=40, num_key_value_heads=kv_heads, tie_word_embeddings=tied, rms_norm_eps=1e-3,
        layer_types=["full_attention"] * 2, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Olmo3ForCausalLM(config)
    state = randomised(model)
    # OLMo has no norm before attention; the shared helper wants one by name.
    weights = llama_weights({**state, **{f"model.layers.{i}.input_layernorm.weight": torch.ones(32) for i in range(2)}},
                            kv_heads)  # fmt: skip
    for i in range(2):
        at, block = f"model.layers.{i}.", weights[i + 2]
        del block["input_layernorm.weight"]
        block |= both(state, at + "post_feedforward_layernorm", "post_feedforward_layernorm")
        block |= both(state, at + "self_attn.q_norm", "attention.q_norm")
        block |= both(state, at + "self_attn.k_norm", "attention.k_norm")
    for tensors in weights.values():
        for name in [name for name in tensors if "norm" in name]:
            tensors[name.replace(".weight", ".scale")] = tensors.pop(name)
    args = small(
        norm="rmsnorm", rms_norm_epsilon=1e-3, norm_placement="olmo3", use_qk_layernorm=True, rotary_emb_base=500000,
        use_separate_qk_norms=True, activation="swiglu", intermediate_size=40, num_kv_heads=kv_heads,
        no_weight_tying=not tied, use_bias_in_attn_linear=False, use_bias_in_mlp=False,
    )  # fmt: skip
    assert weights[2].keys() == {spec.name for spec in layer_params(args)[2]}
    assert_equal_logits(model, args, weights)


@pytest.mark.parametrize("rotary_pct", [0.5, 1.0])
def test_phi_one_norm_for_attention_and_mlp(rotary_pct: float) -> None:
    config = PhiConfig(
        **SIZES, intermediate_size=48, hidden_act="gelu_new",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary_pct},
    )  # fmt: skip
    model = PhiForCausalLM(config)
    randomised(model)
    with torch.no_grad():
        model.lm_head.bias.zero_()  # Phi's own addition
    state = model.state_dict()
    weights: Weights = {0: {"word_embeddings.weight": state["model.embed_tokens.weight"]}}
    for i in range(2):
        at = f"model.layers.{i}."
        weights[i + 2] = {
            **both(state, at + "input_layernorm", "input_layernorm"),
            **both(state, at + "self_attn.dense", "attention.dense"),
            **both(state, at + "mlp.fc1", "mlp.linear1"),
            **both(state, at + "mlp.fc2", "mlp.linear2"),
        }
        for kind in ("weight", "bias"):
            parts = [state[f"{at}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            weights[i + 2][f"attention.query_key_value.{kind}"] = interleaved(parts, 4)
    weights[5] = both(state, "model.final_layernorm", "norm")
    weights[6] = {"final_linear.weight": state["lm_head.weight"]}
    args = small(
        gpt_j_residual=True, gpt_j_tied=True, rotary_pct=rotary_pct, intermediate_size=48, bias_gelu_fusion=True,
        no_weight_tying=True,
    )  # fmt: skip
    assert_equal_logits(model, args, weights)


def test_stablelm_one_norm_and_gated_mlp_without_bias() -> None:
    config = StableLmConfig(
        **SIZES, intermediate_size=40, num_key_value_heads=2, use_qkv_bias=False, use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    model = StableLmForCausalLM(config)
    state = randomised(model)
    ones = {f"model.layers.{i}.post_attention_layernorm.weight": torch.ones(32) for i in range(2)}
    weights = llama_weights({**state, **ones}, 2)
    for i in range(2):
        weights[i + 2] = {k: v for k, v in weights[i + 2].items() if not k.startswith("post_attention_layernorm")}
    args = small(
        gpt_j_residual=True, gpt_j_tied=True, activation="swiglu", intermediate_size=40, num_kv_heads=2,
        no_weight_tying=True, rotary_pct=0.25, use_bias_in_mlp=False, use_bias_in_attn_linear=False,
    )  # fmt: skip
    assert_equal_logits(model, args, weights)


@pytest.mark.parametrize("parallel", [True, False])
def test_no_mlp_bias_keeps_attention(parallel: bool) -> None:
    """GPT-NeoX drops the attention's output under gpt_j_residual without MLP biases, and crashes without a
    gate."""
    config = GPTNeoXConfig(
        **SIZES, intermediate_size=48, use_parallel_residual=parallel, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    randomised(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "mlp" in name and name.endswith("bias"):
                param.zero_()
    state = model.state_dict()
    weights: Weights = {0: {"word_embeddings.weight": state["gpt_neox.embed_in.weight"]}}
    for i in range(2):
        at = f"gpt_neox.layers.{i}."
        weights[i + 2] = {
            **both(state, at + "input_layernorm", "input_layernorm"),
            **both(state, at + "post_attention_layernorm", "post_attention_layernorm"),
            **both(state, at + "attention.query_key_value", "attention.query_key_value"),
            **both(state, at + "attention.dense", "attention.dense"),
            "mlp.linear1.weight": state[at + "mlp.dense_h_to_4h.weight"],
            "mlp.linear2.weight": state[at + "mlp.dense_4h_to_h.weight"],
        }
    weights[5] = both(state, "gpt_neox.final_layer_norm", "norm")
    weights[6] = {"final_linear.weight": model.get_output_embeddings().weight.detach()}
    args = small(gpt_j_residual=parallel, intermediate_size=48, use_bias_in_mlp=False, no_weight_tying=True)
    assert_equal_logits(model, args, weights)
