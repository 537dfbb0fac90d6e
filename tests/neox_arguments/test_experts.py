"""Combinations of `moe_*` keys: their meaning, and refusals."""

from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.validation.experts import router_notes
from megatron.neox_arguments.values.lora_settings import lora_targets
from tests.neox_arguments.conftest import MODEL, refused

MOE = {"moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk"}
SINKHORN = {"moe_router_type": "sinkhorn"}


@pytest.mark.parametrize(("values", "facts"), [
    ({"moe_num_experts": 1, "norm_topk_prob": True}, "norm_topk_prob: moe_num_experts 1"),
    ({"moe_top_k": 9}, "moe_top_k: 9 moe_num_experts 8"),
    ({"moe_layer_freq": [0]}, "moe_layer_freq: no block"),
    ({"moe_layer_freq": [0, 2]}, "moe_layer_freq: list 0 1"),
    ({"moe_layer_freq": [0, 1], "moe_expert_interval": 2}, "moe_layer_freq: moe_expert_interval"),
    (SINKHORN | {"moe_router_bias_update_rate": 0.1}, "moe_router_bias_update_rate: moe_router_type topk sinkhorn"),
    (SINKHORN | {"moe_jitter_eps": 0.1}, "moe_jitter_eps: moe_router_type topk sinkhorn"),
    ({"moe_router_num_groups": 3}, "moe_router_num_groups: 3 moe_num_experts 8"),
    ({"moe_router_group_topk": 1}, "moe_router_group_topk: moe_router_num_groups"),
    ({"moe_router_group_score": "best"}, "moe_router_group_score: moe_router_num_groups"),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 5}, "moe_router_group_topk: 5 moe_router_num_groups 4"),
    ({"moe_router_num_groups": 8, "moe_router_group_topk": 1}, "moe_top_k: 2 1 groups"),
    ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate: moe_shared_expert_intermediate_size"),
    ({"activation": "xielu"}, "activation: xielu moe_num_experts"),
    ({"te_layernorm_mlp": True}, "te_layernorm_mlp: moe_num_experts"),
    ({"expert_parallel_size": 3}, "moe_num_experts: 8 expert_parallel_size 3"),
    ({"moe_num_experts": 9, "model_parallel_size": 2}, "moe_num_experts: 9 2 moe_expert_tensor_parallel cut"),
    ({"model_parallel_size": 4, "moe_expert_tensor_parallel": "cut", "moe_intermediate_size": 6},
     "moe_expert_tensor_parallel: 6 model_parallel_size 4"),
    ({"moe_shared_expert_intermediate_size": 5, "model_parallel_size": 2},
     "moe_shared_expert_intermediate_size: 5 model_parallel_size 2"),
    ({"pipe_parallel_size": 2, "moe_aux_loss_scope": "transformers"},
     "moe_aux_loss_scope: transformers pipe_parallel_size 2"),
    ({"moe_jitter_eps": 1.0}, "moe_jitter_eps: less 1 1.0"),
    ({"expansion_factor": 2}, "moe_intermediate_size: expansion_factor"),
    ({"intermediate_size": [64, 32], "compat_ffn_width": "none"}, "moe_intermediate_size: intermediate_size"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(values: dict[str, Any], facts: str) -> None:
    assert refused(facts, MODEL | MOE | values)


def test_what_a_router_cannot_learn_is_reported(model: dict[str, Any]) -> None:
    def noted(words: str, **values: Any) -> bool:
        return any(words in note for note in router_notes(NeoXArgs.from_dict(model | MOE | values)))

    assert noted("nothing balances the experts")
    for keys in ({"moe_aux_loss_coeff": 0.01}, {"moe_router_bias_update_rate": 0.001}, {"moe_router_type": "sinkhorn"}):
        assert not noted("nothing balances the experts", **keys)
    assert noted("router does not learn", moe_top_k=1, norm_topk_prob=True)
    assert not noted("router does not learn", norm_topk_prob=True) and not noted("router does not learn", moe_top_k=1)


def test_which_blocks_have_experts(model: dict[str, Any]) -> None:
    def blocks(**values: Any) -> list[bool]:
        args = NeoXArgs.from_dict(model | MOE | {"num_layers": 5} | values)
        return [args.has_experts(block) for block in range(5)]

    assert blocks() == [True] * 5
    assert blocks(moe_expert_interval=2) == [True, False, True, False, True]  # as GPT-NeoX counts
    assert blocks(moe_layer_freq=[0, 1, 1]) == [False, True, True, False, True]
    assert blocks(moe_num_experts=1, moe_top_k=1) == [False] * 5


@pytest.mark.parametrize(("values", "width"), [
    ({}, 512),  # as GPT-NeoX: 4 * 96 = 384, rounded up to 256
    ({"activation": "swiglu"}, 256),  # 8 / 3 * 96 = 256
    ({"intermediate_size": 100}, 100),
    ({"activation": "swiglu", "intermediate_size": 100}, 100),  # as it is, gated or not
    ({"intermediate_size": 100, "moe_intermediate_size": 24}, 24),
])  # fmt: skip
def test_the_width_of_an_expert(model: dict[str, Any], values: dict[str, Any], width: int) -> None:
    args = NeoXArgs.from_dict({**model, "hidden_size": 96, **MOE, **values})
    assert args.expert_ffn_size == width
    assert "compat_ffn_width" not in args.refusals() and "intermediate_size" not in args.refusals()


def test_ranks_that_share_out_experts_divide_the_data_ranks(model: dict[str, Any]) -> None:
    args = NeoXArgs.from_dict(model | MOE | {"expert_parallel_size": 4, "train_micro_batch_size_per_gpu": 1})
    with pytest.raises(ConfigError, match="expert_parallel_size: 4 .*2 data-parallel ranks"):
        args.for_world(2)
    assert args.for_world(8).data_parallel_size == 8
    assert args.for_inference(1).expert_parallel_size == 1


def test_adapters_of_a_model_whose_blocks_all_have_experts(model: dict[str, Any]) -> None:
    all_linear = {"activation": "swiglu", "lora": {"target": "all-linear"}}
    args = NeoXArgs.from_dict(model | MOE | all_linear)
    assert lora_targets(args) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert "up_proj" in lora_targets(NeoXArgs.from_dict(model | MOE | all_linear | {"moe_layer_freq": [0, 1]}))
    with pytest.raises(ConfigError, match="up_proj"):
        NeoXArgs.from_dict(model | MOE | all_linear | {"lora": {"target": ["up_proj"]}})
