"""Configurations and tensors of HuggingFace's families with experts: fields, defaults and refusals."""

import re
from typing import Any

import pytest
import transformers

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families.convert import from_hf, hf_config
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.family_models import collected, config_of, on_disk, random_model
from tests.checkpointing.golden import fails
from tests.checkpointing.test_families import PUBLISHED, args_of, broken
from tests.model.stages import small


def test_missing_experts_are_told_in_a_line() -> None:
    def change(shapes: dict[str, Any]) -> None:
        for expert in (0, 7):
            del shapes[f"model.layers.2.block_sparse_moe.experts.{expert}.w1.weight"]
        shapes["model.layers.1.block_sparse_moe.experts.3.w2.weight"] = (32, 47)
        for layer in range(4):
            shapes |= {f"model.layers.{layer}.block_sparse_moe.experts.{8 + e}.w3.weight": (48, 32) for e in range(12)}

    _, *messages = broken("mixtral", change).splitlines()
    expected = (r"missing model.layers.N.block_sparse_moe.experts.E.w1.weight .* 2; .* 0, 7\)",
                r"extra model.layers.N.block_sparse_moe.experts.E.w3.weight .* 0, 1, 2, 3; .* 8, 9, .* 4 more\)",
                r"model.layers.1.block_sparse_moe.experts.3.w2.weight: .*\(32, 47\).*\(32, 48\)")  # fmt: skip
    assert all(re.search(pattern, line) for pattern, line in zip(expected, messages, strict=True)), messages


def test_experts_of_several_dtypes_are_refused() -> None:
    config, tensors = on_disk(random_model("olmoe"))
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[name] = tensors[name].half()
    with pytest.raises(CheckpointError, match="experts .*torch.float32 and torch.float16"):
        collected(from_hf(config, tensors.__getitem__)[1])


def test_experts_of_config_json_are_those_of_transformers() -> None:
    def args(case: str, **changes: Any) -> NeoXArgs:
        return args_of({**config_of(case).to_dict(), **changes})

    config = {**config_of("qwen 3 moe").to_dict(), "num_experts": None}
    assert args_of({**config, "num_local_experts": 16}).moe_num_experts == 16  # as transformers 5 writes it
    assert args_of({**config, "num_experts": 16, "num_local_experts": None}).moe_num_experts == 16
    assert args("qwen 3 moe", decoder_sparse_step=2, mlp_only_layers=[3]).moe_layer_freq == (0, 1, 0, 0)
    assert args("qwen 3 moe", mlp_only_layers=None).moe_layer_freq is None
    assert args("mixtral").norm_topk_prob and not args("olmoe").norm_topk_prob
    assert (args("mixtral").expert_ffn_size, args("qwen 2 moe").expert_ffn_size) == (48, 20)
    windows = {**config_of("qwen 2 moe windows").to_dict(), "layer_types": None}
    hf_windows = transformers.AutoConfig.for_model(**windows)
    assert list(args_of(windows).layer_types or ()) == hf_windows.layer_types and len(set(hf_windows.layer_types)) == 2
    balanced = args("olmoe", output_router_logits=True, router_aux_loss_coef=0.02)
    assert (balanced.moe_aux_loss_coeff, balanced.moe_aux_loss_scope) == (0.02, "transformers")
    written = hf_config(balanced)
    assert written["output_router_logits"] and written["router_aux_loss_coef"] == 0.02
    unscaled = hf_config(balanced.replace(moe_aux_loss_scope="micro_batch"))
    assert not unscaled["output_router_logits"] and "router_aux_loss_coef" not in unscaled
    for case, changes, message in (
        ("mixtral", {"num_local_experts": 1}, "num_local_experts: 1"),
        ("qwen 2 moe", {"num_experts": 0}, "num_experts: 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1"),
        ("olmoe", {"head_dim": 6}, "head_dim: 6"),
        ("qwen 3 moe", {"num_experts_per_tok": 9}, "moe_top_k: 9"),
        ("qwen 3 moe", {"mlp_only_layers": [0, 1, 2, 3]}, "no block has experts"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
            args(case, **changes)


def test_gpt_oss_is_read_as_published_and_refused_otherwise() -> None:
    config = PUBLISHED["openai/gpt-oss-20b"][1]
    args = args_of(config)
    assert args.moe_aux_loss_coeff == 0.0
    written = hf_config(args)
    left_out = {"router_aux_loss_coef", "vocab_size", "rope_scaling"}  # transformers writes into the last one
    assert {n: written[n] for n in config.keys() - left_out} == {n: config[n] for n in config.keys() - left_out}
    assert len(written["rope_scaling"]) == 6 and written["rope_scaling"].items() <= config["rope_scaling"].items()
    two_experts = args_of({**config, "num_experts_per_tok": None, "experts_per_token": 2})
    assert two_experts.moe_top_k == 2 and hf_config(two_experts)["experts_per_token"] == 2
    assert hf_config(args.replace(moe_intermediate_size=1440))["intermediate_size"] == 1440
    unscaled = args_of({**config, "rope_scaling": {"rope_type": "default"}, "initial_context_length": None})
    assert unscaled.rope_scaling is None and "initial_context_length" not in hf_config(unscaled)
    for changes, message in (
        ({"experts_per_token": 2}, "experts_per_token: 2"),
        ({"swiglu_limit": 8.0}, "swiglu_limit: 8.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha: 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        (
            {"initial_context_length": 8192},
            "initial_context_length: 8192 must equal rope_scaling.original_max_position",
        ),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types: chunked_attention"),
        ({"num_local_experts": 1}, "num_local_experts: 1"),
    ):
        fails(re.escape(message), args_of, {**config, **changes})
    llama = {**config_of("llama 2").to_dict(), "rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "truncate": False}}  # fmt: skip
    fails("truncate: false", args_of, llama)
    for changes, message in (
        ({"attention_sinks": False}, "(attention_sinks)"), ({"moe_expert_bias": False}, "(moe_expert_bias)"),
        ({"moe_router_bias": False}, "(moe_router_bias)"), ({"activation": "swiglu"}, "activation: swigluoai"),
        ({"norm_topk_prob": False}, "add up to 1"),
    ):  # fmt: skip
        fails(re.escape(message), hf_config, args.replace(**changes))


def test_which_family_has_which_experts() -> None:
    mixture: dict[str, Any] = {
        "norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 48, "compat_ffn_width": "none",
        "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "moe_num_experts": 4, "moe_top_k": 2,
        "moe_router_type": "topk", "norm_topk_prob": True, "rotary_pct": 1.0, "no_weight_tying": True,
    }  # fmt: skip
    shared = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True, "add_qkv_bias": True}
    assert hf_config(small(**mixture))["model_type"] == "mixtral"
    # Neither what balances experts nor how many tokens they may take is the model's.
    trained = {"moe_router_type": "sinkhorn", "moe_expert_capacity_factor": 2.0}
    assert hf_config(small(**{**mixture, **trained}))["model_type"] == "mixtral"
    assert hf_config(small(**mixture, **shared, moe_layer_freq=[0, 1]))["mlp_only_layers"] == [0]
    for changes, message in (
        ({"norm_topk_prob": False}, r"mixtral: .*\(norm_topk_prob\)"),
        ({"moe_layer_freq": [0, 1]}, r"mixtral: .*\(moe_layer_freq\): 1 .*\[0, 1\]"),
        ({"moe_router_bias_update_rate": 0.001}, "mixtral: .*moe_router_bias_update_rate"),
        ({"moe_router_bias": True}, r"mixtral: .*\(moe_router_bias\)"),
        ({**shared, "moe_shared_expert_gate": False}, r"qwen2_moe: .*\(moe_shared_expert_gate\)"),
    ):
        fails(message, hf_config, small(**{**mixture, **changes}))
    dense = fails(".", hf_config, small(norm="scalenorm"))  # no family with experts is near to it
    assert "experts" not in dense and "mixtral" not in dense
