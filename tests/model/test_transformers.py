"""Logits of transformers' models that no family converts; others: checkpointing/test_family_parity.py."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron.data import Batch
from tests.checkpointing.family_models import randomise
from tests.model.stages import Weights, make_stage, small

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def model_of(kind: str, **keys: Any) -> Any:
    """kind: what the names of its classes begin with."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, **keys)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def randomised(model: Any) -> dict[str, Tensor]:
    return randomise(model.eval(), "").state_dict()


@torch.no_grad()
def assert_equal_logits(model: Any, weights: Weights, **keys: Any) -> None:
    logits = make_stage(small(**keys), weights)(None, Batch(TOKENS, TOKENS, torch.ones_like(TOKENS)))
    expected = model(TOKENS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.transpose(0, 1), expected, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


def interleaved(parts: list[Tensor], heads: int = 4) -> Tensor:
    """[q; k; v] in blocks to NeoX's [q|k|v] per head."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)


def renamed(state: dict[str, Tensor], prefix: str, names: dict[str, str]) -> dict[str, Tensor]:
    """Weights and biases, named by ours. names: ours of theirs; "a.{}.b": queries, keys and values alike."""
    weights = {}
    for hf_name, name in names.items():
        for kind in ("weight", "bias"):
            parts = [f"{prefix}{hf_name.format(part)}.{kind}" for part in ("qkv" if "{}" in hf_name else "-")]
            if parts[0] in state:
                values = [state[part] for part in parts]
                weights[f"{name}.{kind}"] = values[0] if len(values) == 1 else interleaved(values)
    return weights


def two_blocks(
    state: dict[str, Tensor], blocks: str, names: dict[str, str], outer_layers: dict[int, dict[str, str]]
) -> Weights:
    """blocks: the prefix of block number {}; outer_layers: names of the layers around."""
    weights = {layer: renamed(state, "", layer_names) for layer, layer_names in outer_layers.items()}
    return weights | {i + 2: renamed(state, blocks.format(i), names) for i in range(2)}


def llama_weights(state: dict[str, Tensor], kv_heads: int, heads: int = 4) -> Weights:
    weights: Weights = {0: {"word_embeddings.weight": state["model.embed_tokens.weight"]}}
    for i in range(2):
        prefix, block = f"model.layers.{i}.", {}
        for kind in ("weight", "bias"):
            if f"{prefix}self_attn.q_proj.{kind}" in state:
                parts = [state[f"{prefix}self_attn.{k}_proj.{kind}"] for k in "qkv"]
                qkv = interleaved(parts, heads) if kv_heads == heads else torch.cat(parts)
                block[f"attention.query_key_value.{kind}"] = qkv
            if f"{prefix}mlp.up_proj.{kind}" in state:
                block[f"mlp.linear1.{kind}"] = torch.cat(
                    [state[f"{prefix}mlp.{k}_proj.{kind}"] for k in ("up", "gate")]
                )
        names = {"self_attn.o_proj": "attention.dense", "mlp.down_proj": "mlp.linear2"}
        names |= {norm: norm for norm in ("input_layernorm", "post_attention_layernorm")}
        weights[i + 2] = block | renamed(state, prefix, names)
    return weights | {5: renamed(state, "model.", {"norm": "norm"}), 6: renamed(state, "", {"lm_head": "final_linear"})}


@pytest.mark.parametrize(
    "hf_act, gate", {"gelu": "geglu", "relu": "reglu", "linear": "bilinear", "sigmoid": "glu"}.items()
)
def test_llama_with_other_gates(hf_act: str, gate: str) -> None:
    overrides = {"tie_word_embeddings": False, "mlp_bias": True, "rms_norm_eps": 1e-3}
    model = model_of("Llama", intermediate_size=40, num_key_value_heads=2, hidden_act=hf_act, **overrides)
    weights = llama_weights(randomised(model), 2)
    for tensors in weights.values():
        for name in [name for name in tensors if "norm" in name]:
            tensors[name.replace(".weight", ".scale")] = tensors.pop(name)
    assert_equal_logits(model, weights, norm="rmsnorm", rms_norm_epsilon=1e-3, activation=gate, intermediate_size=40,
                        num_kv_heads=2, no_weight_tying=True, use_bias_in_attn_linear=False)  # fmt: skip


def rotary(share: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}


@pytest.mark.parametrize("kv_heads, rotary_pct", [(2, 0.25), (1, 0.5), (4, 0.25)])
def test_stablelm_layernorm_partial_rotary_and_grouped_heads(kv_heads: int, rotary_pct: float) -> None:
    model = model_of("StableLm", intermediate_size=40, num_key_value_heads=kv_heads, use_qkv_bias=True,
                     rope_parameters=rotary(rotary_pct))  # fmt: skip
    weights = llama_weights(randomised(model), kv_heads)
    for i in range(2):
        weights[i + 2]["attention.dense.bias"] = torch.zeros(32)
    assert_equal_logits(model, weights, activation="swiglu", intermediate_size=40, num_kv_heads=kv_heads,
                        no_weight_tying=True, rotary_pct=rotary_pct, use_bias_in_mlp=False)  # fmt: skip


def test_stablelm_one_norm_and_gated_mlp_without_bias() -> None:
    model = model_of("StableLm", intermediate_size=40, num_key_value_heads=2, use_qkv_bias=False,
                     use_parallel_residual=True, rope_parameters=rotary(0.25))  # fmt: skip
    assert_equal_logits(model, llama_weights(randomised(model), 2), gpt_j_residual=True, gpt_j_tied=True,
                        activation="swiglu", intermediate_size=40, num_kv_heads=2, no_weight_tying=True,
                        rotary_pct=0.25, use_bias_in_mlp=False, use_bias_in_attn_linear=False)  # fmt: skip


@pytest.mark.parametrize("rotary_pct", [0.5, 1.0])
def test_phi_one_norm_for_attention_and_mlp(rotary_pct: float) -> None:
    model = model_of("Phi", intermediate_size=48, hidden_act="gelu_new", rope_parameters=rotary(rotary_pct))
    state = randomised(model)
    state["lm_head.bias"].zero_()  # Phi's own addition
    names = {"input_layernorm": "input_layernorm", "self_attn.{}_proj": "attention.query_key_value"}
    names |= {"self_attn.dense": "attention.dense", "mlp.fc1": "mlp.linear1", "mlp.fc2": "mlp.linear2"}
    outer_layers = {0: {"model.embed_tokens": "word_embeddings"}, 5: {"model.final_layernorm": "norm"}}
    weights = two_blocks(state, "model.layers.{}.", names, outer_layers)
    weights[6] = {"final_linear.weight": state["lm_head.weight"]}
    assert_equal_logits(model, weights, gpt_j_residual=True, gpt_j_tied=True, rotary_pct=rotary_pct,
                        intermediate_size=48, bias_gelu_fusion=True, no_weight_tying=True)  # fmt: skip


@pytest.mark.parametrize("parallel", [True, False])
def test_no_mlp_bias_keeps_attention(parallel: bool) -> None:
    """GPT-NeoX drops attention under gpt_j_residual without MLP biases, and crashes without a gate."""
    overrides = {"use_parallel_residual": parallel, "tie_word_embeddings": False}
    model = model_of("GPTNeoX", intermediate_size=48, rope_parameters=rotary(1.0), **overrides)
    state = randomised(model)
    for name, value in state.items():
        if "mlp" in name and name.endswith("bias"):
            value.zero_()
    shared_names = ("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense")
    names = {name: name for name in shared_names} | {
        "mlp.dense_h_to_4h": "mlp.linear1",
        "mlp.dense_4h_to_h": "mlp.linear2",
    }
    outer_layers = {0: {"gpt_neox.embed_in": "word_embeddings"}, 5: {"gpt_neox.final_layer_norm": "norm"}}
    weights = two_blocks(state, "gpt_neox.layers.{}.", names, outer_layers)
    for i in (2, 3):
        del weights[i]["mlp.linear1.bias"], weights[i]["mlp.linear2.bias"]
    weights[6] = {"final_linear.weight": model.get_output_embeddings().weight.detach()}
    keys = {"intermediate_size": 48, "use_bias_in_mlp": False, "no_weight_tying": True}
    assert_equal_logits(model, weights, gpt_j_residual=parallel, **keys)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom_alibi(heads: int) -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=8 * heads, n_layer=2, n_head=heads)
    model: Any = transformers.BloomForCausalLM(config)
    model.transformer.word_embeddings_layernorm = nn.Identity()  # BLOOM's own addition
    names = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm",
             "self_attention.query_key_value": "attention.query_key_value", "self_attention.dense": "attention.dense",
             "mlp.dense_h_to_4h": "mlp.linear1", "mlp.dense_4h_to_h": "mlp.linear2"}  # fmt: skip
    outer_layers = {0: {"transformer.word_embeddings": "word_embeddings"}, 5: {"transformer.ln_f": "norm"}}
    weights = two_blocks(randomised(model), "transformer.h.{}.", names, outer_layers)
    keys = {"hidden_size": 8 * heads, "num_attention_heads": heads, "pos_emb": "alibi", "bias_gelu_fusion": True}
    assert_equal_logits(model, weights, **keys)


@pytest.mark.parametrize("offset", [0, 2, 3])
def test_opt_learned_positions_behind_an_offset(offset: int) -> None:
    model = model_of("OPT", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=30, dropout=0.0)
    model.model.decoder.embed_positions.offset = offset
    names = {"self_attn.{}_proj": "attention.query_key_value", "self_attn_layer_norm": "input_layernorm",
             "self_attn.out_proj": "attention.dense", "final_layer_norm": "post_attention_layernorm",
             "fc1": "mlp.linear1", "fc2": "mlp.linear2"}  # fmt: skip
    prefix = "model.decoder."
    embeddings = {f"{prefix}embed_tokens": "word_embeddings", f"{prefix}embed_positions": "position_embeddings"}
    outer_layers = {0: embeddings, 5: {f"{prefix}final_layer_norm": "norm"}}
    weights = two_blocks(randomised(model), f"{prefix}layers.{{}}.", names, outer_layers)
    # HuggingFace counts positions, the table has two more.
    keys = {"max_position_embeddings": 32, "activation": "relu", "intermediate_size": 48}
    assert_equal_logits(model, weights, pos_emb="learned", opt_pos_emb_offset=offset, **keys)
