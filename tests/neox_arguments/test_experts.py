"""What `moe_*` keys mean together, and what is refused of them."""

from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.validation.experts import router_notes

MOE = {"moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_num_experts": 1, "norm_topk_prob": True}, "norm_topk_prob: needs moe_num_experts above 1"),
        ({"moe_top_k": 9}, "moe_top_k: 9 is more than moe_num_experts 8"),
        ({"moe_layer_freq": [0]}, "moe_layer_freq: no block has experts"),
        ({"moe_layer_freq": [0, 2]}, "moe_layer_freq: is a list of 0 and 1"),
        ({"moe_layer_freq": [0, 1], "moe_expert_interval": 2}, "says it too; remove one of them"),
        ({"moe_router_type": "sinkhorn", "moe_router_bias_update_rate": 0.1}, "write moe_router_type: topk"),
        ({"moe_router_type": "sinkhorn", "moe_jitter_eps": 0.1}, "write moe_router_type: topk"),
        ({"moe_router_num_groups": 3}, "moe_router_num_groups: 3 does not divide moe_num_experts 8"),
        ({"moe_router_group_topk": 1}, "moe_router_group_topk: needs moe_router_num_groups"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 5}, "5 is more than moe_router_num_groups 4"),
        ({"moe_router_num_groups": 8, "moe_router_group_topk": 1}, "moe_top_k: 2 is more than the experts of 1 groups"),
        ({"moe_shared_expert_gate": True}, "needs moe_shared_expert_intermediate_size"),
        ({"activation": "xielu"}, "xielu has parameters of its own"),
        ({"te_layernorm_mlp": True}, "Transformer-Engine's MLP has no experts"),
        ({"expert_parallel_size": 2, "pipe_parallel_size": 2}, "does not go with pipe_parallel_size 2"),
        ({"expert_parallel_size": 3}, "8 cannot be shared out over expert_parallel_size 3"),
        ({"moe_num_experts": 9, "model_parallel_size": 2}, "set moe_expert_tensor_parallel: cut"),
        (
            {"model_parallel_size": 4, "moe_expert_tensor_parallel": "cut", "moe_intermediate_size": 6},
            "the width 6 of an expert is not a multiple of model_parallel_size 4",
        ),
        ({"moe_shared_expert_intermediate_size": 5, "model_parallel_size": 2}, "5 is not a multiple of"),
        ({"pipe_parallel_size": 2, "moe_aux_loss_scope": "transformers"}, "transformers is a sum over all layers"),
        ({"moe_jitter_eps": 1.0}, "moe_jitter_eps"),
        ({"expansion_factor": 2}, "moe_intermediate_size: is needed beside expansion_factor"),
        ({"intermediate_size": [64, 32], "compat_ffn_width": "none"}, "moe_intermediate_size: is needed"),
    ],
)
def test_what_does_not_fit_is_refused(model: dict[str, Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict(model | MOE | values)
    assert message in str(caught.value)


def test_what_a_router_cannot_learn_is_said(model: dict[str, Any]) -> None:
    def told(words: str, **values: Any) -> bool:
        return any(words in note for note in router_notes(NeoXArgs.from_dict(model | MOE | values)))

    assert told("nothing balances the experts")
    for keys in ({"moe_aux_loss_coeff": 0.01}, {"moe_router_bias_update_rate": 0.001}, {"moe_router_type": "sinkhorn"}):
        assert not told("nothing balances the experts", **keys)
    assert told("no router learns", moe_top_k=1, norm_topk_prob=True)
    assert not told("no router learns", norm_topk_prob=True) and not told("no router learns", moe_top_k=1)


def test_which_blocks_have_experts(model: dict[str, Any]) -> None:
    def blocks(**values: Any) -> list[bool]:
        args = NeoXArgs.from_dict(model | MOE | {"num_layers": 5} | values)
        return [args.has_experts(block) for block in range(5)]

    assert blocks() == [True] * 5
    assert blocks(moe_expert_interval=2) == [True, False, True, False, True]  # as GPT-NeoX counts
    assert blocks(moe_layer_freq=[0, 1, 1]) == [False, True, True, False, True]
    assert blocks(moe_num_experts=1, moe_top_k=1) == [False] * 5


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ({}, 512),  # as GPT-NeoX: 4 * 96 = 384, rounded up to 256
        ({"activation": "swiglu"}, 256),  # 8 / 3 * 96 = 256
        ({"intermediate_size": 100}, 100),
        ({"activation": "swiglu", "intermediate_size": 100}, 100),  # as it is, gated or not
        ({"intermediate_size": 100, "moe_intermediate_size": 24}, 24),
    ],
)
def test_the_width_of_an_expert(model: dict[str, Any], values: dict[str, Any], width: int) -> None:
    args = NeoXArgs.from_dict({**model, "hidden_size": 96, **MOE, **values})
    assert args.expert_ffn_size == width
    assert "compat_ffn_width" not in args.refusals() and "intermediate_size" not in args.refusals()


def test_ranks_that_share_out_experts_divide_the_data_ranks(model: dict[str, Any]) -> None:
    args = NeoXArgs.from_dict(model | MOE | {"expert_parallel_size": 4, "train_micro_batch_size_per_gpu": 1})
    with pytest.raises(ConfigError, match="expert_parallel_size: 4 does not divide the 2 data-parallel ranks"):
        args.for_world(2)
    assert args.for_world(8).data_parallel_size == 8
    assert args.for_inference(1).expert_parallel_size == 1


def test_adapters_of_a_model_whose_blocks_all_have_experts(model: dict[str, Any]) -> None:
    from megatron.neox_arguments.values.adapters import lora_targets

    whole = {"activation": "swiglu", "lora": {"target": "all-linear"}}
    args = NeoXArgs.from_dict(model | MOE | whole)
    assert lora_targets(args) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert "up_proj" in lora_targets(NeoXArgs.from_dict(model | MOE | whole | {"moe_layer_freq": [0, 1]}))
    with pytest.raises(ConfigError, match="up_proj: no linear of this model"):
        NeoXArgs.from_dict(model | MOE | whole | {"lora": {"target": ["up_proj"]}})
